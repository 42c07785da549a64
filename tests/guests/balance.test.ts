/** Encoder lanes that share images by cost train as lanes that encode what they have read. */
import { describe, expect, test } from "bun:test";
import { resolve } from "node:path";
import { runRanks } from "../parallel/ranks.ts";

const program = resolve(import.meta.dir, "balance-rank.ts");

async function compare(layout: string, ranks: number, flags: Record<string, unknown> = {}) {
	const outcomes = await runRanks(program, ranks, [layout, JSON.stringify(flags)]);
	for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const found = outcomes.map(({ stdout }) => JSON.parse(stdout) as Record<string, number>);
	for (const { loss, gradient, compared, left } of found) {
		expect(loss).toBeLessThan(1e-5);
		expect(gradient).toBeLessThan(1e-5);
		expect(compared).toBeGreaterThan(0);
		expect(left).toBe(0);
	}
	const moved = found.some(({ moved }) => moved! > 0);
	// A fit of other costs deals otherwise.
	if (moved) expect(found.some(({ moved, movedByFit }) => moved !== movedByFit)).toBeTrue();
	expect(found.every(({ movedByNumber }) => movedByNumber === 0)).toBe(true);
	return { moved };
}

describe("images shared by cost", () => {
	const cases: readonly [name: string, layout: string, ranks: number, flags?: Record<string, unknown>][] = [
		["on ranks of their own, encoder lanes sharing a language lane", "dp2+1", 3],
		["with tensor-parallel lanes", "tp2dp2|tp2dp2", 4],
		["on the stages of a pipeline", "dp2|pp2", 2],
		["with a frozen tower", "dp2|dp2", 2, { "freeze-vit": true }],
		["with a tower that takes a picture as two frames", "dp2|dp2", 2, { "vision-temporal-patch-size": 2 }],
	];
	for (const [name, ...given] of cases) {
		test(name, async () => {
			expect(await compare(...given)).toEqual({ moved: true });
		}, 60_000);
	}

	test("stay on their lanes where the encoder has stages", async () => {
		expect(await compare("dp2pp2+1", 5, { "vision-num-layers": 4 })).toEqual({ moved: false });
	}, 60_000);
});
