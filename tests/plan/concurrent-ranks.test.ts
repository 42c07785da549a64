/** Ranks that work beside one that is timed. */
import { expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import { ConcurrentRanks } from "../../src/plan/concurrent-ranks.ts";

const c = configurationOf({ preset: "nemotron-vlm-tiny", "train-iters": 100 });

test("a step lasts until the slowest rank has finished its own; another begins them all again", async () => {
	await using company = await ConcurrentRanks.open(c, [0], 1);
	const seconds: number[] = [];
	for (let step = 1; step <= 3; step++) {
		let calls = 0;
		const started = performance.now();
		const { own, companions } = company.step(() => calls++);
		const whole = (performance.now() - started) / 1000;
		expect(calls).toBe(1);
		expect([...companions.keys()]).toEqual([0]);
		expect(companions.get(0)!).toBeGreaterThan(own);
		expect(whole).toBeGreaterThanOrEqual(companions.get(0)!);
		seconds.push(companions.get(0)!);
	}
	// Each was a step of its own.
	expect(new Set(seconds).size).toBe(3);
}, 60_000);

test("a companion that cannot begin is not waited for", async () => {
	await using company = await ConcurrentRanks.open({ ...c, hybridLayerPattern: "X" }, [0], 1);
	const { companions } = company.step(() => {});
	expect(companions.get(0)).toBe(0);
}, 60_000);
