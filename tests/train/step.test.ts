/** A training step: recomputation, accumulation, live memory, errors that name the failed part. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { type Microbatch, withoutImages } from "../../src/data/microbatch.ts";
import { countingLibrary } from "../../src/native/counting-library.ts";
import { Device } from "../../src/native/device.ts";
import { NativeError } from "../../src/system/errors.ts";
import { describeNonFinite } from "../../src/train/report/non-finite.ts";
import type { StepObserver } from "../../src/train/step-state.ts";
import { relativeRms, testDevice } from "../support.ts";
import { batch, Training, tiny, train } from "./training.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const recomputation = (method: "uniform" | "block", layers: number) => ({
	"recompute-granularity": "full",
	"recompute-method": method,
	"recompute-num-layers": layers,
});

const inspected = ({ run }: Training) => ({
	...run.state,
	parameters: [run.language!.parameters],
	pattern: run.language!.config.pattern,
});

describe("recomputation changes nothing", () => {
	for (const [method, layers] of [
		["uniform", 1],
		["uniform", 3],
		["block", 2],
	] as const) {
		test(`${method}, ${layers} layers, with dropout, balancing losses and z-loss`, async () => {
			const options = {
				"hidden-dropout": 0.1,
				"attention-dropout": 0.1,
				"moe-z-loss-coeff": 1e-3,
				"moe-router-load-balancing-type": ["seq_aux_loss", "global_aux_loss"],
				"moe-aux-loss-coeff": [1e-2, 1e-2],
			};
			const plain = await train(device, tiny(options), 2, (step) => batch(2, step + 1));
			const again = await train(device, tiny({ ...options, ...recomputation(method, layers) }), 2, (step) =>
				batch(2, step + 1),
			);
			expect(again.results).toEqual(plain.results);
			expect(again.weights).toEqual(plain.weights);
		});
	}
});

describe("late weight gradients change nothing", () => {
	const layers = {
		"hidden-dropout": 0.1,
		"moe-router-load-balancing-type": ["seq_aux_loss"],
		"moe-aux-loss-coeff": [1e-2],
	};
	for (const [name, keys] of [
		["weights of the output layer its own", { "untie-embeddings-and-output-weights": true }],
		["tied embeddings", { "untie-embeddings-and-output-weights": false }],
		["layers recomputed in pairs", { ...recomputation("uniform", 2) }],
		["two of the layers recomputed", { ...recomputation("block", 2) }],
	] as const) {
		test(name, async () => {
			const config = tiny({ ...layers, ...keys });
			const before = device.memoryStatistics().liveBytes;
			const immediate = await train(device, config, 2, (step) => batch(3, step + 1));
			const late = await train(device, config, 2, (step) => batch(3, step + 1), true);
			expect(late).toEqual(immediate);
			expect(device.memoryStatistics().liveBytes).toBe(before);
		});
	}

	test("their actions follow each backward pass; a frozen model has none", async () => {
		using run = await Training.open(tiny(), device, { lateWeightGradients: true });
		const kinds = (training: Training) => training.run.state.passes.actions(2).map(({ kind }) => kind);
		const each = ["forward", "backward", "weight gradient"] as const;
		expect(kinds(run)).toEqual([...each, ...each, "reduce"]);
		using frozen = await Training.open(tiny(), device, { frozen: true, lateWeightGradients: true });
		expect(kinds(frozen)).not.toContain("weight gradient");
	});
});

test("microbatches add up: one of four sequences or two of two give the same loss and nearly the same gradient", async () => {
	const [first, second] = batch(2) as [Microbatch, Microbatch];
	const joined: Microbatch = {
		ids: Int32Array.of(...first.ids, ...second.ids),
		labels: Int32Array.of(...first.labels, ...second.labels),
		lossMask: Float32Array.of(...first.lossMask, ...second.lossMask),
		lengths: [...first.lengths, ...second.lengths],
	};
	const cut = (await train(device, tiny(), 1, () => [first, second])).results[0]!;
	const whole = (await train(device, tiny(), 1, () => [joined])).results[0]!;
	expect(Math.abs(cut.loss / whole.loss - 1)).toBeLessThan(1e-6);
	expect(Math.abs(cut.gradientNorm / whole.gradientNorm - 1)).toBeLessThan(1e-5);
	expect(cut.tokens).toBe(whole.tokens);
});

test("masked labels do not count", async () => {
	const [microbatch] = batch(1) as [Microbatch];
	const lossMask = microbatch.lossMask.map((_, token) => (token % 3 === 0 ? 0 : 1));
	const labels = microbatch.labels.map((label, token) => (token % 3 === 0 ? -100 : label));
	const masked = (await train(device, tiny(), 1, () => [{ ...microbatch, lossMask, labels }])).results[0]!;
	const other = (await train(device, tiny(), 1, () => [{ ...microbatch, lossMask }])).results[0]!;
	expect(masked.tokens).toBe(32);
	expect(other.loss).toBe(masked.loss);
	expect(other.gradientNorm).toBe(masked.gradientNorm);
});

test("the first microbatch writes the gradients of matrices, the others add to them", async () => {
	const products: string[] = [];
	using counted = Device.open(
		countingLibrary({
			kind: "cpu",
			observe: (name, { accumulate, transpose_a, beta, m, n }) => {
				if (name === "grouped_gemm_weight_gradient") products.push(`experts ${accumulate}`);
				if (name === "gemm" && transpose_a === 1) products.push(`[${m}, ${n}] ${beta}`);
			},
		}),
	);
	for (const tied of [false, true]) {
		products.splice(0);
		using run = await Training.open(tiny({ "untie-embeddings-and-output-weights": !tied }), counted);
		run.step(batch(3));
		const each = products.length / 3;
		const microbatch = (index: number) => products.slice(each * index, each * (index + 1));
		expect(microbatch(0).filter((product) => product.startsWith("experts"))).not.toEqual([]);
		expect(microbatch(0).every((product) => product.endsWith(" 0"))).toBeTrue();
		const added = microbatch(0).map((product) => product.replace(/0$/, "1"));
		expect(microbatch(1)).toEqual(added);
		expect(microbatch(2)).toEqual(added);
	}
});

test("live memory returns to the baseline after every step and the peak stays over 100 steps", async () => {
	using run = await Training.open(tiny(), device);
	const [microbatch] = batch(1) as [Microbatch];
	run.step([microbatch]);
	const baseline = device.memoryStatistics();
	for (let step = 1; step <= 100; step++) {
		run.step([microbatch], step);
		const { liveBytes, liveBlocks } = device.memoryStatistics();
		expect({ step, liveBytes, liveBlocks }).toEqual({
			step,
			liveBytes: baseline.liveBytes,
			liveBlocks: baseline.liveBlocks,
		});
	}
	// Two threads may or may not hold their temporary memory at the same moment.
	expect(device.memoryStatistics().peakBytes).toBeLessThan(baseline.peakBytes * 1.05);
});

test("bf16 with fp32 master weights learns the batch as fp32 does", async () => {
	const same = batch(1);
	const f32 = (await train(device, tiny(), 30, () => same)).results;
	const bf16 = (await train(device, tiny({ bf16: true }), 30, () => same)).results;
	expect(f32.at(-1)!.loss).toBeLessThan(f32[0]!.loss - 1);
	for (const [step, { loss }] of f32.entries()) expect(Math.abs(bf16[step]!.loss / loss - 1)).toBeLessThan(0.03);
});

test("gradients that are divided in memory for an observer make the same update", async () => {
	const after = async (observer: StepObserver) => {
		using run = await Training.open(tiny(), device);
		const norms = [0, 1].map(
			(iteration) => run.step(batch(2, iteration + 1), iteration, 1e-3, 0.1, observer).gradientNorm,
		);
		return { norms, weights: run.weights() };
	};
	const seen: number[] = [];
	const [alone, observed] = [await after({}), await after({ gradients: () => seen.push(seen.length) })];
	expect(seen).toEqual([0, 1]);
	// Above 1: the gradients are clipped too.
	for (const [step, norm] of alone.norms.entries()) {
		expect(norm).toBeGreaterThan(1);
		expect(Math.abs(observed.norms[step]! / norm - 1)).toBeLessThan(1e-6);
	}
	expect(relativeRms(observed.weights, alone.weights)).toBeLessThan(1e-6);
});

test("a frozen model has no gradients and nothing changes", async () => {
	using run = await Training.open(tiny(), device, { frozen: true });
	const before = run.weights();
	const result = run.step(batch(1), 0, 1, 1);
	expect(result.gradientNorm).toBe(0);
	expect(run.weights()).toEqual(before);
});

describe("failures", () => {
	test("out of memory is one sentence and leaves no memory behind", async () => {
		using run = await Training.open(tiny(), device);
		run.step(batch(1));
		const live = device.memoryStatistics().liveBytes;
		device.limitMemory(live + 50_000);
		let error: unknown;
		try {
			run.step(batch(1), 1);
		} catch (caught) {
			error = caught;
		}
		device.limitMemory(0);
		expect(error).toBeInstanceOf(NativeError);
		expect((error as Error).message).toMatch(/^Out of device memory: \d+ bytes for \w+ on top of .*\.$/);
	});

	test("what is not finite is named: parameter, layer or gradient", async () => {
		using run = await Training.open(tiny(), device);
		const microbatches = batch(1);
		const weight = run.run.language!.parameters.get(
			"language_model.decoder.layers.2.self_attention.linear_proj.weight",
		).value;
		device.run("fill", { y: weight, elements: weight.elements, value: 1e38, dtype: weight.dtypeCode });
		expect(run.step(microbatches).updated).toBeFalse();
		expect(describeNonFinite(inspected(run), microbatches.map(withoutImages))).toBe(
			"the first layer whose output is not finite is layer 2 (attention)",
		);
		device.run("fill", { y: weight, elements: 1, value: Number.NaN, dtype: weight.dtypeCode });
		expect(describeNonFinite(inspected(run), microbatches.map(withoutImages))).toContain(
			"layers.2.self_attention.linear_proj.weight already",
		);
	});
});
