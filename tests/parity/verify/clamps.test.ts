/** Values at the edge of a gated activation's clamp: counted by channel on any layout, named where one is on the other side. */
import { afterAll, describe, expect, spyOn, test } from "bun:test";
import * as projection from "../../../src/models/language/projection.ts";
import { renderLayouts } from "../../../src/parity/verify/verdict.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const clamp = 0.05;
const clamped = {
	"hybrid-layer-pattern": "E*-E",
	"squared-relu": false,
	swiglu: true,
	"activation-func-clamp-value": clamp,
};

describe("channels have the counts of one process", () => {
	for (const [layout, keys] of [
		["1+tp2ep2", { "moe-mlp-glu-interleave-size": 8, "delay-wgrad-compute": true }],
		["1+tp2ep1etp2", { "moe-fused-mlp": "off", "moe-mlp-glu-interleave-size": null }],
		["dp2|pp2", { "hybrid-layer-pattern": "E*|-E", "recompute-granularity": "full" }],
	] as const) {
		test(`${layout} ${JSON.stringify(keys)}`, async () => {
			const { failures, result, verdict } = await run.reportOf(layout, { ...clamped, ...keys });
			expect(failures).toEqual([]);
			expect(result!.clampFlips).toEqual({ count: 0, first: null });
			expect(verdict!.ties).toEqual([]);
		}, 60_000);
	}
});

test("a value that is moved across the edge is named, with the gradients that it changes", async () => {
	const { project } = projection;
	let plant: ReturnType<typeof spyOn> | null = null;
	let moved: { readonly input: bigint | number; readonly channel: number } | null = null;
	const moveOne = () => {
		plant = spyOn(projection, "project").mockImplementation((...args) => {
			const z = project(...args);
			if (args[3] !== "mlp.linear_fc1.weight") return z;
			const values = z.toFloat32();
			const input = Bun.hash(values);
			// All runs of the layout begin with the same microbatch.
			if (moved !== null && moved.input !== input) return z;
			const [edge, half] = [Math.fround(clamp), z.width / 2];
			// Of the gates near the edge the one with the largest factor, so that its gradient shows.
			const shows = (at: number) =>
				at % z.width < half && Math.abs(values[at]! - edge) < 1e-3 ? Math.abs(values[at + half]!) : 0;
			const at = values.reduce((best, _, other) => (shows(other) > shows(best) ? other : best), 0);
			expect(shows(at)).toBeGreaterThan(0);
			moved = { input, channel: at % z.width };
			values[at] = values[at]! > edge ? edge : Math.fround(edge + 2 ** -22);
			z.device.copyToDevice(z, values);
			return z;
		});
	};
	try {
		const report = await run.reportOf("1", clamped, moveOne);
		expect(report.result!.clampFlips).toMatchObject({
			count: 1,
			first: { place: "the MLP of layer.2", half: "gate", channel: moved!.channel },
		});
		const [failure] = report.failures;
		expect(failure).toContain("the gradient of language_model.decoder.layers.2.mlp.linear_fc1.");
		expect(renderLayouts([report])).toContain(
			`1: one value falls on the other side of activation-func-clamp-value ${clamp}, first in the MLP of layer.2: channel ${moved!.channel} of the gate, `,
		);
	} finally {
		plant!.mockRestore();
	}
}, 60_000);
