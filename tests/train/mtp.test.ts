/** Multi-token prediction beyond the references: repeated depths, recomputation, packed sequences, evaluation. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { withoutImages } from "../../src/data/microbatch.ts";
import { rolled } from "../../src/guests/mtp/mtp.ts";
import { storedDepths } from "../../src/models/language/layer-numbering.ts";
import type { Device } from "../../src/native/device.ts";
import { evaluate } from "../../src/train/evaluate.ts";
import { testDevice } from "../support.ts";
import { batch, Training, tiny, train } from "./training.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const pattern = { "hybrid-layer-pattern": "M*E-/*E/*E", "moe-router-load-balancing-type": ["none"] };

test("the shift stays inside a sequence", () => {
	const microbatch = {
		ids: Int32Array.of(1, 2, 3, 4, 5, 6),
		labels: Int32Array.of(2, 3, -100, 5, 6, 7),
		lossMask: Float32Array.of(1, 1, 0, 1, 1, 1),
		lengths: [3, 3],
	};
	expect(rolled(microbatch, 1)).toEqual({
		ids: Int32Array.of(2, 3, 0, 5, 6, 0),
		labels: Int32Array.of(3, -100, 0, 6, 7, 0),
		lossMask: Float32Array.of(1, 0, 0, 1, 1, 0),
	});
	expect(rolled(microbatch, 4).lossMask).toEqual(new Float32Array(6));
});

test("recomputed depths change nothing", async () => {
	const options = { ...pattern, "hidden-dropout": 0.1, "moe-router-load-balancing-type": ["seq_aux_loss"] };
	const plain = await train(device, tiny(options), 2, (step) => batch(2, step + 1));
	const recompute = { "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1 };
	expect(await train(device, tiny({ ...options, ...recompute }), 2, (step) => batch(2, step + 1))).toEqual(plain);
	expect(Object.keys(plain.results[0]!.losses)).toEqual(["lm loss", "mtp_1 loss", "mtp_2 loss"]);
});

test("repeated depths run one depth's parameters and router, whose gradient is the sum over depths", async () => {
	/** `share`: of the routers' coefficients. A pass of repeated depths has half of them in its gradient. */
	const configOf = (share: number, repeated: boolean) =>
		tiny({
			...pattern,
			"mtp-use-repeated-layer": repeated,
			"moe-router-load-balancing-type": ["seq_aux_loss"],
			"moe-aux-loss-coeff": [share],
			"moe-z-loss-coeff": 0.1 * share,
			"moe-router-bias-update-rate": 0.01,
		});
	const configs = [configOf(0.5, false), configOf(1, true)] as const;
	using several = await Training.open(configs[0], device);
	using one = await Training.open(configs[1], device);
	expect(configs.map(storedDepths)).toEqual([2, 1]);
	const valuesOf = ({ run }: Training) =>
		new Map([...run.language!.parameters].map((parameter) => [parameter.name, parameter]));
	const [all, shared] = [valuesOf(several), valuesOf(one)];
	// Equal weights everywhere.
	for (const [name, { value }] of all) {
		const source = shared.get(name.replace("mtp.layers.1.", "mtp.layers.0."))!;
		device.copy(value, source.value, value.bytes);
	}
	const results = [several, one].map((training) => training.step(batch(2), 0, 0, 0));
	expect(results[1]!.losses).toEqual(results[0]!.losses);
	const gradient = (parameters: typeof all, name: string) => [...parameters.get(name)!.mainGradient!.toFloat32()];
	for (const end of [
		"eh_proj.weight",
		"mtp_model_layer.layers.0.self_attention.linear_qkv.weight",
		"mtp_model_layer.layers.1.mlp.router.weight",
	]) {
		const name = (depth: number) => `language_model.mtp.layers.${depth}.${end}`;
		const [first, second] = [gradient(all, name(0)), gradient(all, name(1))];
		const largest = Math.max(...first.map(Math.abs));
		const off = gradient(shared, name(0)).map((value, at) => Math.abs(value - first[at]! - second[at]!));
		expect(largest).toBeGreaterThan(0);
		expect(Math.max(...off) / largest).toBeLessThan(1e-5);
	}
	const routersOf = ({ run }: Training) =>
		[...run.language!.routers].flatMap(([layer, router]) => (layer < configs[0].pattern.length ? [] : [router]));
	const [first, second] = routersOf(several).map(({ stepTokens }) => [...stepTokens.toInt32()]);
	const [router] = routersOf(one);
	const counts = first!.map((count, expert) => count + second![expert]!);
	expect([...router!.stepTokens.toInt32()]).toEqual(counts);
	const mean = counts.reduce((sum, count) => sum + count, 0) / counts.length;
	const moved = counts.map((count) => Math.fround(0.01 * Math.sign(mean - count)));
	expect([...router!.expertBias.toFloat32()]).toEqual(moved);
	expect(new Set(moved).size).toBeGreaterThan(1);
	// The logged losses of a router are means over its passes.
	const [apart, together] = results.map(({ balancingByLayer }) => [...balancingByLayer.values()].slice(-2));
	for (const [name, loss] of Object.entries(together!.at(-1)!))
		expect(loss).toBeCloseTo((apart![0]![name]! + apart![1]![name]!) / 2, 5);
});

test("an evaluation has the losses of all depths", async () => {
	using training = await Training.open(tiny(pattern), device);
	const microbatches = batch(2).map(withoutImages);
	const { losses } = evaluate(training.run.state, microbatches);
	const trained = training.step(batch(2)).losses;
	expect(Object.keys(losses)).toEqual(["lm loss", "mtp_1 loss", "mtp_2 loss"]);
	for (const [name, value] of Object.entries(losses)) expect(value).toBeCloseTo(trained[name]!, 5);
});

test("a microbatch whose depths have no target trains on the next token alone", async () => {
	using training = await Training.open(tiny(pattern), device);
	const [microbatch] = batch(1);
	const lossMask = new Float32Array(microbatch!.ids.length);
	lossMask[0] = 1;
	const { losses, gradientNorm } = training.step([{ ...microbatch!, lossMask }]);
	expect([losses["mtp_1 loss"], losses["mtp_2 loss"]]).toEqual([0, 0]);
	expect(gradientNorm).toBeGreaterThan(0);
});

test("late weight gradients of the depths change nothing", async () => {
	for (const repeated of [false, true]) {
		const config = tiny({
			...pattern,
			"mtp-use-repeated-layer": repeated,
			"recompute-granularity": "full",
			"recompute-method": "uniform",
			"recompute-num-layers": 1,
		});
		const immediate = await train(device, config, 2, (step) => batch(2, step + 1));
		expect(await train(device, config, 2, (step) => batch(2, step + 1), true)).toEqual(immediate);
	}
});
