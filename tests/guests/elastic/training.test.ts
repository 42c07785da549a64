/** Training of an elastic model: one step, and the result of a few hundred (docs/spec/elastic.md §12). */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { copyBlocks, loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { distillation, RankDistillation } from "../../../src/guests/distillation/distillation.ts";
import type { ElasticConfig } from "../../../src/guests/elastic/config.ts";
import { elastic as elasticGuest, routerIn } from "../../../src/guests/elastic/elastic.ts";
import { expectedSizes, usageOf } from "../../../src/guests/elastic/router/budget-loss.ts";
import { type Draw, sampleAxis, withoutNoise } from "../../../src/guests/elastic/router/network.ts";
import { unitsOfSubmodel } from "../../../src/guests/elastic/submodel/configuration.ts";
import { submodelOfSizes } from "../../../src/guests/elastic/submodel/family.ts";
import { selectionsOf } from "../../../src/guests/elastic/submodel/units.ts";
import type { Device } from "../../../src/native/device.ts";
import type { Run } from "../../../src/train/assemble.ts";
import type { RunSpecification } from "../../../src/train/run-specification.ts";
import { trainStep } from "../../../src/train/step.ts";
import type { StepResult } from "../../../src/train/step-state.ts";
import { testDevice } from "../../support.ts";
import { byLayer, type Family, familyOf, softMasks, text } from "./family-model.ts";
import { openFamily } from "./family-run.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const open = (
	family: Family,
	elastic: ElasticConfig | null,
	changes: Partial<RunSpecification> = {},
	draw?: Draw,
): Promise<Run> =>
	openFamily(family, device, {
		guests: elastic === null ? [] : [elasticGuest({ config: elastic, ...(draw && { draw: () => draw }) })],
		...changes,
	});

const step = (run: Run, iteration = 0, learningRate = 0, gradients: () => void = () => {}): StepResult =>
	trainStep(run.state, { microbatches: [text], iteration, learningRate, weightDecay: 0 }, { gradients });

function teacherOf({ guests }: Run) {
	return guests.find((guest) => guest instanceof RankDistillation)!.teacher.model;
}

/** All gradients of the router, by name. */
function routerGradients(run: Run): Map<string, Float32Array> {
	return new Map(
		[...routerIn(run.guests)!.parameters].map(({ name, mainGradient }) => [name, mainGradient!.toFloat32()]),
	);
}

describe("losses", () => {
	const family = familyOf({ ...byLayer, ...softMasks });
	const at = (budget: number): Draw => ({
		budget: { value: budget, parent: budget === 1 },
		hard: false,
		noise: ({ sizes, layers }) => new Float64Array((layers?.length ?? 1) * sizes.length),
	});
	/** Losses and gradients of a step at a budget. */
	const trained = async (changes: Partial<ElasticConfig>, budget: number) => {
		const elastic = { ...family.elastic, ...changes };
		using run = await open(family, elastic, {}, at(budget));
		let gradients = new Map<string, Float32Array>();
		const { losses, tokens } = step(run, 0, 0, () => {
			if (!elastic.router.frozen) gradients = routerGradients(run);
		});
		return { losses, tokens, gradients };
	};

	test("the budget's is weighed by loss-alpha, and the language model's is reported without it", async () => {
		const [none, once, often] = [
			await trained({ lossWeight: 0 }, 0.5),
			await trained({ lossWeight: 1 }, 0.5),
			await trained({ lossWeight: 10 }, 0.5),
		];
		for (const { losses } of [once, often]) expect(losses).toEqual(none.losses);
		expect(none.losses["budget loss"]).toBeGreaterThan(0.05);
		for (const [name, own] of none.gradients) {
			const [a, b] = [once.gradients.get(name)!, often.gradients.get(name)!];
			const difference = (x: Float32Array) => Math.hypot(...x.map((value, i) => value - own[i]!));
			expect(difference(b) / difference(a)).toBeCloseTo(10, 3);
		}
	});

	test("a frozen router has none", async () => {
		const { losses } = await trained({ router: { ...family.elastic.router, frozen: true } }, 0.5);
		expect(Object.keys(losses)).toEqual(["lm loss", "lm loss (budget)"]);
	});

	test("of a microbatch without tokens that count are none, and leave no gradient", async () => {
		using run = await open(family, family.elastic, {}, at(0.5));
		const silent = { ...text, text: { ...text.text, lossMask: new Float32Array(text.text.lossMask.length) } };
		const { losses, tokens, gradientNorm, updated } = trainStep(run.state, {
			microbatches: [silent],
			iteration: 0,
			learningRate: 0,
			weightDecay: 0,
		});
		expect([losses["lm loss"], tokens, gradientNorm, updated]).toEqual([0, 0, 0, true]);
	});

	test("microbatches are told apart by their budget, in the dead band too", async () => {
		const { model } = family;
		const elastic = { ...family.elastic, budgets: [1, 0.7] };
		using run = await open(family, elastic, {}, at(0.7));
		using sampled = routerIn(run.guests)!.sample([at(0.7)], 0, { trains: false });
		const value = usageOf(elastic, model, sampled.microbatches[0]!.loss.expected).value;
		const inside = await trained({ budgets: [1, value * 1.01] }, value * 1.01);
		expect(inside.losses["budget loss"]).toBe(0);
		expect(inside.losses["lm loss (budget)"]).toBe(inside.losses["lm loss"]!);
		expect(inside.losses["lm loss (full)"]).toBeUndefined();
		const parent = await trained({}, 1);
		expect(parent.losses["lm loss (full)"]).toBe(parent.losses["lm loss"]!);
		expect(parent.losses["lm loss (budget)"]).toBeUndefined();
	});
});

test("the router's learning rate is a multiple of the model's", async () => {
	const family = familyOf({ ...byLayer, ...softMasks, "lr-mult-router": 7 });
	using run = await open(family, family.elastic);
	const read = () => {
		const norm = "language_model.decoder.final_norm.weight";
		const gate = "elastic_router.gate_mamba.2.weight";
		return [run.language!.parameters.get(norm), routerIn(run.guests)!.parameters.get(gate)].map(({ value }) =>
			value.toFloat32(),
		);
	};
	const before = read();
	step(run, 0, 1e-3);
	// Adam's first step is the rate, whatever the gradient.
	const [ofModel, ofRouter] = read().map((after, at) =>
		Math.max(...after.map((x, i) => Math.abs(x - before[at]![i]!))),
	);
	expect(ofModel!).toBeCloseTo(1e-3, 5);
	expect(ofRouter!).toBeCloseTo(7e-3, 5);
});

test("every gate's gradient is that of the whole model's differences along it", async () => {
	const family = familyOf({
		...byLayer,
		...softMasks,
		"init-method-std": 0.15,
		"linear-scaler-end": 1,
		"router-std": 0.3,
	});
	const noise: Draw["noise"] = ({ name, sizes, layers }) =>
		Float64Array.from({ length: (layers?.length ?? 1) * sizes.length }, (_, at) => Math.sin(at + name.length));
	const draw: Draw = { budget: { value: 0.7, parent: false }, hard: false, noise };
	using run = await open(family, { ...family.elastic, lossWeight: 0 }, {}, draw);
	// The last two experts have every token, so that a small change chooses no others.
	for (const { expertBias } of run.language!.routers.values())
		device.copyToDevice(expertBias, Float32Array.of(0, 0, 0, 0, 50, 80));
	let gradients = new Map<string, Float32Array>();
	step(run, 0, 0, () => {
		gradients = routerGradients(run);
	});
	for (const { name, value } of routerIn(run.guests)!.parameters) {
		const gradient = gradients.get(name)!;
		const norm = Math.hypot(...gradient);
		const before = value.toFloat32();
		const lossAt = (by: number) => {
			device.copyToDevice(
				value,
				before.map((x, i) => x + (by * gradient[i]!) / norm),
			);
			return step(run).loss;
		};
		const length = 0.005;
		const slope = (lossAt(length) - lossAt(-length)) / (2 * length);
		device.copyToDevice(value, before);
		expect([name, Math.abs(slope / norm - 1) < 0.01]).toEqual([name, true]);
	}
});

test("what a submodel lacks gets no gradient when it alone is sampled", async () => {
	const family = familyOf(byLayer);
	const { model, elastic, c } = family;
	const noise: Draw["noise"] = ({ sizes, layers }) =>
		Float64Array.from({ length: (layers?.length ?? 1) * sizes.length }, (_, at) => {
			const row = Math.floor(at / sizes.length);
			return at % sizes.length === Math.min(sizes.length - 1, 1 + (row % 3)) ? 1e6 : 0;
		});
	const draw: Draw = { budget: { value: 0.5, parent: false }, hard: true, noise };
	using run = await open(family, elastic, {}, draw);
	using sampled = routerIn(run.guests)!.sample([draw], 0, { trains: false });
	const submodel = submodelOfSizes(model, sampled.microbatches[0]!.loss.expected);
	using store = new ValueStore("parent", run.language!);
	const selections = new Map(
		[...selectionsOf(store, c, unitsOfSubmodel(c, submodel)).values()].map((selection) => [
			selection.source,
			selection,
		]),
	);
	const touched: string[] = [];
	let [outside, inside] = [0, 0];
	step(run, 0, 0, () => {
		for (const { name, value, gradient, shape, blocks } of run.language!.logicalTensors()) {
			value[Symbol.dispose]();
			if (gradient === null) continue;
			using own = gradient;
			const width = shape.slice(1).reduce((product, size) => product * size, 1);
			const full = new Float32Array(shape[0]! * width);
			copyBlocks(own.toFloat32(), own.width, full, width, blocks, "to full");
			const selection = selections.get(name);
			const rows = new Set(selection?.rows ?? (selection ? full.keys() : []));
			const columns = new Set(selection?.columns ?? (selection ? full.keys() : []));
			for (const [at, d] of full.entries()) {
				const kept = rows.has(Math.floor(at / width)) && columns.has(at % width);
				if (kept) inside += d === 0 ? 0 : 1;
				else outside++;
				if (!kept && d !== 0) touched.push(name);
			}
		}
	});
	expect([...new Set(touched)]).toEqual([]);
	expect(Math.min(outside, inside)).toBeGreaterThan(5000);
});

test("a family of a taught parent comes to its budgets", async () => {
	const axes = {
		...{ "emb-int-list": [32, 28, 24, 20, 16], "mamba-int-list": [8, 6, 4, 2], "mlp-int-list": [24, 20, 16, 12, 8] },
		...{ "moe-expert-int-list": [6, 4, 2], "head-int-list": null, "add-skipping": false, "layer-ranking-list": null },
	};
	const budgets = [1, 0.7, 0.5];
	const family = familyOf({
		...softMasks,
		...{ ...axes, "budget-list": budgets, "hybrid-layer-pattern": "ME*E", "router-std": 0.1 },
		...{ "lr-mult-router": 3, "normalize-router-logits": true, "tau-decay": 0.999, "init-method-std": 0.1 },
	});
	const iterations = 300;
	const elastic = { ...family.elastic, scale: { start: 1, end: 5, iterations } };
	using parent = await open(family, null);
	for (let iteration = 0; iteration < 60; iteration++) step(parent, iteration, 3e-3);
	using weights = new ValueStore("parent", parent.language!);
	using run = await open(family, elastic, {
		guests: [distillation({ teacher: "frozen", alpha: 1, temperature: 1 }, elastic), elasticGuest({ config: elastic })],
	});
	for (const model of [run.language!, teacherOf(run)]) loadModel(model, weights);
	run.state.optimizer.refreshMasters();
	const divergences = new Map<number, number[]>(budgets.map((budget) => [budget, []]));
	for (let iteration = 0; iteration < iterations; iteration++) {
		const { losses } = step(run, iteration, 2e-3 * (1 - iteration / iterations));
		for (const budget of budgets) {
			const own = losses[`logits distillation loss ${budget.toFixed(3)}`];
			if (own !== undefined) divergences.get(budget)!.push(own);
		}
	}
	const trained = routerIn(run.guests)!.weights();
	for (const budget of budgets) {
		const draw = withoutNoise({ value: budget, parent: budget === 1 });
		const sample = new Map(
			elastic.axes.map((axis) => {
				const own = sampleAxis(elastic, axis, trained.get(axis.name)!, iterations, draw);
				return [axis.name, { ...own, probabilities: own.soft }];
			}),
		);
		const { value } = usageOf(elastic, family.model, expectedSizes(elastic, family.model, sample));
		expect([budget, Math.abs(value / budget - 1) < 0.05 || value]).toEqual([budget, true]);
		if (budget === 1) for (const { soft } of sample.values()) expect(soft[0]!).toBeGreaterThan(0.95);
		const all = divergences.get(budget)!;
		const mean = (from: number, to: number) => all.slice(from, to).reduce((sum, x) => sum + x, 0) / (to - from);
		const tenth = Math.floor(all.length / 10);
		expect([budget, mean(all.length - tenth, all.length) < 0.2 * mean(0, tenth)]).toEqual([budget, true]);
	}
}, 60_000);
