/** Bracket groups compute what the flat pattern computes, and are the unit of recomputation. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { testDevice } from "../support.ts";
import { batch, Training, tiny, train } from "./training.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const options = { "hidden-dropout": 0.1, "attention-dropout": 0.1, "moe-aux-loss-coeff": [1e-2] };
const run = (pattern: string, more = {}) =>
	train(device, tiny({ ...options, "hybrid-layer-pattern": pattern, ...more }), 2, (step) => batch(2, step + 1));

for (const [flat, grouped] of [
	["*-", ["[*-]"]],
	["*E", ["[*E]"]],
	["MM*-", ["M[M*]-", "[MM*-]"]],
	["MEM*E", ["[ME][M*E]", "ME[M*E]"]],
] as const) {
	test(`${grouped.join(", ")} are ${flat}, bit for bit`, async () => {
		const plain = await run(flat);
		for (const pattern of grouped) expect(await run(pattern)).toEqual(plain);
	});
}

test("recomputed groups change nothing, and a group is one of recompute-num-layers", async () => {
	const plain = await run("MM-*E");
	const peak = async (pattern: string, layers: number) => {
		const keys = { "recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": layers };
		expect(await run(pattern, keys)).toEqual(plain);
		device.resetPeakMemory();
		using training = await Training.open(tiny({ ...options, "hybrid-layer-pattern": pattern, ...keys }), device);
		training.step(batch(1));
		return device.memoryStatistics().peakBytes;
	};
	// One group of three layers keeps as much as three layers, and less than one.
	expect(await peak("[MM-]*E", 1)).toBeLessThan(await peak("MM-*E", 1));
	// A group's layers are all recomputed at once. On a processor workspaces are larger than what they keep then, on a GPU not.
	if (device.library.kind !== "cpu") return;
	expect(await peak("[MM-]*E", 2)).toBeLessThanOrEqual(await peak("MM-*E", 4));
});
