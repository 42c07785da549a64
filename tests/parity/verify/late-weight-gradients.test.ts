/** Late weight gradients are the immediate ones bit for bit; one that is lost or computed twice is found. */
import { afterAll, afterEach, describe, expect, spyOn, test } from "bun:test";
import { recomputeModuleNames } from "../../../src/config/recompute-modules.ts";
import { type LayoutReport, renderLayouts } from "../../../src/parity/verify/verdict.ts";
import { Tape, type TapeSegment } from "../../../src/tensor/tape.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

function reportOf(layout: string, keys: Readonly<Record<string, unknown>> = {}): Promise<LayoutReport> {
	return run.reportOf(layout, { "delay-wgrad-compute": true, "hybrid-layer-pattern": "ME|*-", ...keys });
}

describe("late weight gradients are bitwise the immediate ones", () => {
	const full = process.env.MIMO_TEST_FULL === "1";
	const recomputed = { "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 2 };
	const modules = { "recompute-granularity": "selective", "recompute-modules": recomputeModuleNames };
	const quick = [
		["1", { "untie-embeddings-and-output-weights": false }],
		["dp2|pp2", recomputed],
	] as const;
	const all = [
		["1+pp2", {}],
		["1+pp2", { "untie-embeddings-and-output-weights": false }],
		["dp2|pp2", { "hybrid-layer-pattern": "M|E|*|-" }],
		["1+pp2", { "freeze-lm": true }],
		["1+pp4", { "hybrid-layer-pattern": "ME|*||-" }],
		["tp2|ep2dp2", {}],
		["dp2+pp2ep2dp2", {}],
		["dp4|pp2tp2", recomputed],
		["dp4|pp2tp2ep2", modules],
	] as const;
	for (const [layout, keys] of full ? [...quick, ...all] : quick) {
		test(`${layout} ${JSON.stringify(keys)}`, async () => {
			const report = await reportOf(layout, keys);
			expect(report.failures).toEqual([]);
			expect(report.result!.reordered).toEqual({ what: "late weight gradients", gradients: 0, weights: 0 });
			expect(report.result!.zero).toEqual({ gradients: 0, weights: 0 });
			expect(renderLayouts([report])).toContain("late = immediate");
		}, 60_000);
	}
});

describe("verify finds a late weight gradient", () => {
	const { drain } = Tape.prototype;
	let plant: ReturnType<typeof spyOn>;
	afterEach(() => plant.mockRestore());

	/** Layer 3's feed-forward block: the tasks are those of its second projection and its first one. */
	const before = (change: (tasks: TapeSegment["tasks"]) => void) =>
		spyOn(Tape.prototype, "drain").mockImplementation(function (this: Tape) {
			const { tasks } = this.segments.find(({ name }) => name === "layer.3")!;
			if (tasks.length > 0) change(tasks);
			drain.call(this);
		});

	test("that is lost", async () => {
		plant = before((tasks) => {
			for (const tensor of tasks.pop()!.held) tensor[Symbol.dispose]();
		});
		const { failures, result } = await reportOf("1");
		expect(plant).toHaveBeenCalled();
		expect(failures[0]).toContain(
			"the gradient of language_model.decoder.layers.3.mlp.linear_fc1.weight is off by 1.0e+0",
		);
		expect(failures.join("\n")).toContain("late weight gradients change 1536 elements of the gradients");
		expect(result!.reordered!.weights).toBeGreaterThan(1536);
	});

	test("that is computed twice", async () => {
		plant = before((tasks) => tasks[0]!.run());
		const { failures } = await reportOf("1");
		expect(plant).toHaveBeenCalled();
		expect(failures[0]).toContain(
			"the gradient of language_model.decoder.layers.3.mlp.linear_fc2.weight is off by 1.0e+0",
		);
		expect(failures.join("\n")).toContain("late weight gradients change 1536 elements of the gradients");
	});
});
