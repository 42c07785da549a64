/** A model beside a frozen teacher: its losses, their weights, and its gradients. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { copyBlocks, loadModel, ValueStore } from "../../src/checkpoint/model-store.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { withoutImages } from "../../src/data/microbatch.ts";
import { distillation, distillationLossName, RankDistillation } from "../../src/guests/distillation/distillation.ts";
import type { Point } from "../../src/guests/distillation/settings.ts";
import type { DistillationOptions } from "../../src/guests/distillation/teacher.ts";
import type { Axis } from "../../src/guests/elastic/axes.ts";
import { elastic as elasticGuest } from "../../src/guests/elastic/elastic.ts";
import { elasticConfig } from "../../src/guests/elastic/from-configuration.ts";
import type { Draw } from "../../src/guests/elastic/router/network.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import type { Device } from "../../src/native/device.ts";
import { languageAlone, namedTopology } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { languageMicrobatches, planOf } from "../../src/parity/verify/samples.ts";
import { axpby, Tensor } from "../../src/tensor/index.ts";
import { assemble, type Run } from "../../src/train/assemble.ts";
import { trainStep } from "../../src/train/step.ts";
import type { StepResult } from "../../src/train/step-state.ts";
import { smallModel } from "../models/small.ts";
import { smallSubject } from "../parity/verify/subject.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const { language, samples, adam, sequenceLength } = smallSubject({ "llm-only": true });
const layout = namedTopology(languageAlone);
const plan = planOf(layout, { samples: samples.length, microBatchSize: 4, sequenceLength });
const microbatches = languageMicrobatches(plan, samples, 0).map((text) => ({
	text,
	features: {},
}));

/** A student of seed 1 and a teacher with the weights of another seed; null: no teacher. */
async function open(
	options: Pick<DistillationOptions, "alpha" | "pairs"> | null,
	teacherSeed: number,
	temperature = 1,
): Promise<Run> {
	const specification = {
		...{ encoders: [], clipGrad: 0, seed: 1, language, adam },
		frozenLanguage: false,
		guests: options === null ? [] : [distillation({ teacher: "frozen", ...options, temperature }, null)],
	};
	const run = await assemble(specification, layout.topology, World.alone(device));
	const guest = run.guests.find((guest) => guest instanceof RankDistillation);
	if (guest) {
		run.initialise(teacherSeed);
		using weights = new ValueStore("teacher", run.language!);
		loadModel(guest.teacher.model, weights);
	}
	run.initialise(1);
	return run;
}

const step = (run: Run, gradients: () => void = () => {}): StepResult =>
	trainStep(run.state, { microbatches, iteration: 0, learningRate: 1e-2, weightDecay: 0 }, { gradients });

/** All gradients, one after the other. */
function gradientsOf(run: Run): Float32Array {
	const all: number[] = [];
	for (const { value, gradient, shape, blocks } of run.language!.logicalTensors()) {
		if (gradient) {
			const full = new Float32Array(shape.reduce((product, size) => product * size, 1));
			copyBlocks(gradient.toFloat32(), gradient.width, full, full.length / shape[0]!, blocks, "to full");
			all.push(...full);
			gradient[Symbol.dispose]();
		}
		value[Symbol.dispose]();
	}
	return Float32Array.from(all);
}

test("a teacher of the same weights teaches nothing; the divergence from another one falls", async () => {
	using same = await open({ alpha: 1 }, 1);
	const nothing = step(same);
	expect(Math.abs(nothing.losses[distillationLossName]!)).toBeLessThan(1e-6);
	expect(nothing.gradientNorm).toBeLessThan(1e-4);
	using other = await open({ alpha: 1 }, 2, 2);
	const first = step(other).losses[distillationLossName]!;
	for (let count = 0; count < 6; count++) step(other);
	const last = step(other).losses[distillationLossName]!;
	expect(first).toBeGreaterThan(1e-3);
	expect(last).toBeLessThan(0.5 * first);
});

test("the gradient is that of both losses by their weights", async () => {
	const gradients: Float32Array[] = [];
	// Without a teacher, of the divergence alone, and of both: a wrong weight in both of the latter would not cancel.
	for (const alpha of [null, 1, 0.25]) {
		using run = await open(alpha === null ? null : { alpha }, 2);
		step(run, () => gradients.push(gradientsOf(run)));
	}
	const [plain, taught, mixed] = gradients as [Float32Array, Float32Array, Float32Array];
	const wanted = plain.map((x, at) => 0.75 * x + 0.25 * taught[at]!);
	const norm = Math.sqrt(wanted.reduce((sum, x) => sum + x * x, 0));
	expect(Math.sqrt(mixed.reduce((sum, x, at) => sum + (x - wanted[at]!) ** 2, 0))).toBeLessThan(1e-5 * norm);
	expect(Math.sqrt(taught.reduce((sum, x) => sum + x * x, 0))).toBeGreaterThan(1e-3);
});

describe("a model that is its own teacher", () => {
	const c = configurationOf({
		...smallModel,
		"hybrid-layer-pattern": "ME*",
		"moe-router-bias-update-rate": 0,
		...{ flextron: true, "enable-router": true, "self-distillation": true, "budget-list": [1, 0.6] },
		...{ "emb-int-list": [32, 16], "mlp-int-list": [24, 12] },
	});
	const model = hybridConfig(c);
	const elastic = elasticConfig(c, model, 10)!;
	/** Every microbatch has the budget and its likeliest sizes but for one, whose width is as told. */
	const openAt = async (budget: number, width: 0 | 1) => {
		const forced = (axis: Axis) =>
			axis.sizes.map((_, choice) => (choice === (axis.name === "emb" ? width : 0) ? 1e6 : 0));
		const draw: Draw = { budget: { value: budget, parent: budget === 1 }, hard: true, noise: forced };
		const run = await assemble(
			{
				...{ encoders: [], clipGrad: 0, seed: 1, language: model, adam },
				frozenLanguage: false,
				guests: [
					distillation({ teacher: "self", alpha: 1, temperature: 1 }, elastic),
					elasticGuest({ config: elastic, draw: () => draw }),
				],
			},
			layout.topology,
			World.alone(device),
		);
		run.initialise(3);
		return run;
	};
	const trainOnce = (run: Run) => {
		const text = withoutImages({
			ids: Int32Array.from({ length: 24 }, (_, t) => (7 * t) % 61),
			labels: Int32Array.from({ length: 24 }, (_, t) => (7 * t + 7) % 61),
			lossMask: new Float32Array(24).fill(1),
			lengths: [24],
		});
		return trainStep(run.state, { microbatches: [text], iteration: 0, learningRate: 1e-2, weightDecay: 0 });
	};

	test("a smaller budget learns from it until both agree, the parent's own from labels", async () => {
		using parent = await openAt(1, 0);
		const own = trainOnce(parent);
		expect(Object.keys(own.losses)).toEqual(["lm loss", "budget loss", "lm loss (full)"]);
		expect(own.gradientNorm).toBeGreaterThan(0.1);
		using narrow = await openAt(0.6, 1);
		const first = trainOnce(narrow).losses;
		expect(first["logits distillation loss"]).toBeGreaterThan(1e-5);
		expect(first["logits distillation loss 0.600"]).toBe(first["logits distillation loss"]!);
		// At the parent's sizes the model is its own teacher, so the divergence is zero.
		using whole = await openAt(0.6, 0);
		expect(Math.abs(trainOnce(whole).losses["logits distillation loss"]!)).toBeLessThan(1e-6);
	});
});

test("layers in between weigh as much as the divergence, and the gradient is that of both", async () => {
	const pair = (student: Point, teacher: Point, loss: "cosine" | "mse") => ({ student, teacher, loss });
	const pairs = [
		pair({ layer: 1, norm: null }, { layer: 0, norm: null }, "mse"),
		pair({ layer: 2, norm: "input" }, { layer: 2, norm: "input" }, "cosine"),
		pair({ layer: 3, norm: "final" }, { layer: 3, norm: "final" }, "cosine"),
	];
	/** Losses after a step of `length` against the gradient, and the gradient. */
	const at = async (direction: readonly (Tensor | null)[], length: number) => {
		using run = await open({ alpha: 1, pairs }, 2);
		const tensors = [...run.language!.logicalTensors()];
		for (const [index, { value }] of tensors.entries()) {
			if (direction[index]) axpby(direction[index], value, length, 1);
		}
		const gradients: (Tensor | null)[] = [];
		const { losses, gradientNorm } = step(run, () => {
			for (const { value, gradient } of run.language!.logicalTensors()) {
				gradients.push(gradient);
				value[Symbol.dispose]();
			}
			for (const [index, gradient] of gradients.entries()) {
				if (!gradient) continue;
				const copy = Tensor.from(device, gradient.toFloat32(), gradient.shape);
				gradient[Symbol.dispose]();
				gradients[index] = copy;
			}
		});
		for (const { value, gradient } of tensors) for (const one of [value, gradient]) one?.[Symbol.dispose]();
		return { losses, gradients, norm: gradientNorm };
	};
	const here = await at([], 0);
	const [divergence, hidden] = [here.losses[distillationLossName]!, here.losses["intermediate distillation loss"]!];
	expect(here.losses["total loss"]).toBeCloseTo(2 * divergence, 5);
	const sum = ({ losses }: typeof here) =>
		losses[distillationLossName]! + (divergence / hidden) * losses["intermediate distillation loss"]!;
	const length = 2e-3 / here.norm;
	const slope = (sum(await at(here.gradients, length)) - sum(await at(here.gradients, -length))) / (2 * length);
	expect(Math.abs(slope / here.norm ** 2 - 1)).toBeLessThan(0.01);
	for (const gradient of here.gradients) gradient?.[Symbol.dispose]();
});
