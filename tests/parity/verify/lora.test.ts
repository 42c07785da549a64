/** Low-rank adapters train the same on every layout; a gradient of one that is lost is found. */
import { afterAll, afterEach, describe, expect, spyOn, test } from "bun:test";
import type { LayoutReport } from "../../../src/parity/verify/verdict.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const dense = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"];
const tower = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"].map((name) => `vision_model.${name}`);
const projector = ["vision_projection.linear_fc1", "vision_projection.linear_fc2"];
const experts = ["experts.linear_fc1", "experts.linear_fc2"];

function reportOf(layout: string, keys: Readonly<Record<string, unknown>>): Promise<LayoutReport> {
	return run.reportOf(layout, { "lora-rank": 3, "delay-wgrad-compute": true, ...keys });
}

describe("layouts give what one process gives", () => {
	const dropped = { "lora-target-modules": dense, "lora-dropout": 0.2 };
	const frozen = { "freeze-vit": true, "freeze-projection": true };
	const cut = { "hybrid-layer-pattern": "ME|*-" };
	const vision = { "vision-projection-type": "mlp" };
	const recomputed = { "recompute-granularity": "full", "recompute-num-layers": 2 };
	const gated = { "squared-relu": false, swiglu: true };
	const quick = [
		["1+tp2", { ...dropped, ...recomputed }],
		["tp2|ep2dp2", { ...frozen, "lora-target-modules": experts }],
		["tp2+pp2", { ...vision, ...cut, "lora-target-modules": [...dense, ...tower, ...projector] }],
		// The language model is frozen as a whole.
		["tp2dp2+1", { ...vision, "lora-target-modules": tower, "freeze-projection": true }],
	] as const;
	const all = [
		["1", dropped],
		["tp2+tp2ep2", { ...dropped, ...frozen }],
		["1+pp2", { ...dropped, ...cut }],
		["dp2|pp2", { ...dropped, ...cut, ...recomputed }],
		["dp4|tp2dp2ep2", { ...dropped, ...gated }],
		["tp2+pp2tp2", { ...cut, ...frozen, "lora-target-modules": [...dense, ...experts] }],
		["1+dp2ep2", { ...gated, "lora-target-modules": [...dense, ...experts] }],
		// Stage 0 has no trainable parameter.
		["1+pp2", { ...cut, ...frozen, "lora-target-modules": ["linear_proj"] }],
		["1+pp2", { "hybrid-layer-pattern": "ME|*-/M", "moe-router-load-balancing-type": ["none"], ...dropped }],
		["1+tp2", { "untie-embeddings-and-output-weights": false, ...dropped }],
		["dp2|pp2", { ...vision, ...cut, "lora-target-modules": [...dense, ...tower, ...projector] }],
		["tp2+1", { ...vision, "lora-target-modules": projector, "freeze-vit": true }],
		["tp2+tp2ep2", { ...vision, "lora-target-modules": ["linear_qkv", "vision_model.linear_fc2"] }],
	] as const;
	for (const [layout, keys] of process.env.MIMO_TEST_FULL === "1" ? [...quick, ...all] : quick) {
		test(`${layout} ${JSON.stringify(keys)}`, async () => {
			const { failures, result } = await reportOf(layout, keys);
			expect(failures).toEqual([]);
			const equal = { gradients: 0, weights: 0 };
			expect(result).toMatchObject({ zero: equal, reordered: equal });
			expect(result!.differences.updated.every(({ different }) => different === 0)).toBeTrue();
		}, 60_000);
	}
});

describe("verify finds", () => {
	let plant: ReturnType<typeof spyOn>;
	afterEach(() => plant.mockRestore());

	test("a lost gradient of an adapter", async () => {
		const { drain } = Tape.prototype;
		plant = spyOn(Tape.prototype, "drain").mockImplementation(function (this: Tape) {
			const { tasks } = this.segments.find(({ name }) => name === "layer.3")!;
			if (tasks.length > 0) for (const tensor of tasks.pop()!.held) tensor[Symbol.dispose]();
			drain.call(this);
		});
		const { failures } = await reportOf("1", {});
		expect(plant).toHaveBeenCalled();
		expect(failures[0]).toContain(
			"the gradient of language_model.decoder.layers.3.mlp.linear_fc1.adapter.linear_in.weight is off by 1.0e+0",
		);
	});
});
