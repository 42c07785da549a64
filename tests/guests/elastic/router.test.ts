/** The router's networks, draws and lists of sizes (docs/spec/elastic.md §2–§5). */
import { describe, expect, test } from "bun:test";
import { type Axis, rankingProblem, sizesOf, sizesProblem } from "../../../src/guests/elastic/axes.ts";
import type { ElasticConfig } from "../../../src/guests/elastic/config.ts";
import { memoryProfiles } from "../../../src/guests/elastic/memory.ts";
import { drawBudget, drawFor } from "../../../src/guests/elastic/router/draws.ts";
import {
	addAxisGradient,
	budgetVector,
	type Draw,
	routerParameters,
	sampleAxis,
	withoutNoise,
} from "../../../src/guests/elastic/router/network.ts";
import { randomValues } from "../../support.ts";
import { familyOf } from "./family-model.ts";
import { elasticModel, testElastic } from "./models.ts";

const model = elasticModel("ME*", {
	hidden: 16,
	vocabulary: 8,
	mamba: { heads: 8, headDim: 2, groups: 2, stateDim: 2 },
	attention: { heads: 4, queryGroups: 2, headDim: 2 },
	moe: { experts: 4, topk: 2, ffn: 8, shared: 0 },
});
const config = testElastic(model, { emb: [16, 8] });

test("by default the router has four networks, and probabilities of an axis's sizes", () => {
	const lists = { "emb-int-list": [32, 16], "head-int-list": null, "add-skipping": false, "layer-ranking-list": null };
	const { elastic, model: parent } = familyOf(lists);
	expect(elastic.axes.map(({ name }) => name)).toEqual(["mlp", "mamba", "moe_expert", "emb"]);
	const own = routerParameters(elastic);
	expect(own.map(({ name }) => name)).toEqual(
		["mlp", "mamba", "moe_expert", "emb"].flatMap((axis) =>
			[0, 2].map((layer) => `elastic_router.gate_${axis}.${layer}.weight`),
		),
	);
	expect(own.every(({ shard, alwaysF32 }) => shard.kind === "replicated" && alwaysF32 === true)).toBe(true);
	const weights = {
		first: Float64Array.from(randomValues(128 * 3, 1)),
		second: Float64Array.from(randomValues(128 * 2, 2)),
	};
	const [emb] = elastic.axes.slice(-1);
	const sampled = (iteration: number) => {
		const draw = drawFor(elastic, { iteration, microbatch: 0, lanes: 0 }, 1);
		return sampleAxis(elastic, emb!, weights, iteration, draw);
	};
	expect([...sampled(0).probabilities]).toHaveLength(2);
	expect([32, 16]).toContain(emb!.sizes[sampled(0).chosen[0]!]!);
	expect(sampled(0).soft).toEqual(sampled(0).soft);
	expect(sampled(100).soft).not.toEqual(sampled(0).soft);
	expect(parent.hiddenSize).toBe(32);
});

test("a budget between two is their mixture; outside of them the nearest, or Megatron's continuation", () => {
	const vector = (value: number, extrapolates = false) => [
		...budgetVector([1, 0.8, 0.5], { value, parent: false }, { extrapolates }),
	];
	expect(vector(0.8)).toEqual([0, 1, 0]);
	expect(vector(0.65).map((x) => Math.round(x * 1e9) / 1e9)).toEqual([0, 0.5, 0.5]);
	expect(vector(0.4)).toEqual([0, 0, 1]);
	expect(vector(0.4, true).map((x) => Math.round(x * 1e9) / 1e9)).toEqual([0, -0.333333333, 1.333333333]);
	expect([...budgetVector([0.8, 0.5], { value: 1, parent: true }, { extrapolates: false })]).toEqual([1, 0]);
});

describe("an axis's network has the gradient of its differences", () => {
	for (const [name, axis, normalise] of [
		["alone", { name: "mamba", sizes: [8, 6, 4], layers: null }, false],
		["normalised, by layer", { name: "moe_expert", sizes: [4, 3, 2], layers: [1, 2] }, true],
	] as const) {
		test(name, () => {
			const own = {
				...config,
				router: { ...config.router, normalise },
				scale: { start: 1, end: 3, iterations: 10 },
				temperature: { initial: 0.7, decay: 0.9 },
			};
			const rows = (axis as Axis).layers?.length ?? 1;
			const weights = {
				first: Float64Array.from(randomValues(8 * 2, 1)),
				second: Float64Array.from(randomValues(rows * 3 * 8, 2)),
			};
			const noise = randomValues(rows * 3, 3);
			const draw: Draw = { budget: { value: 0.8, parent: false }, hard: false, noise: () => noise };
			const pull = randomValues(rows * 3, 4);
			const value = () =>
				sampleAxis(own, axis, weights, 4, draw).probabilities.reduce((sum, p, at) => sum + p * pull[at]!, 0);
			const gradient = {
				first: new Float64Array(weights.first.length),
				second: new Float64Array(weights.second.length),
			};
			addAxisGradient(sampleAxis(own, axis, weights, 4, draw), weights, pull, gradient);
			for (const key of ["first", "second"] as const) {
				for (const at of weights[key].keys()) {
					const step = 1e-5;
					weights[key][at]! += step;
					const above = value();
					weights[key][at]! -= 2 * step;
					const below = value();
					weights[key][at]! += step;
					expect((above - below) / (2 * step)).toBeCloseTo(gradient[key][at]!, 7);
				}
			}
		});
	}
});

test("normalised logits of two choices are the same whatever they are but for their order, and have no gradient at all", () => {
	const axis: Axis = { name: "mamba", sizes: [8, 4], layers: null };
	const own = { ...config, router: { ...config.router, normalise: true } };
	const weights = { first: Float64Array.from(randomValues(16, 5)), second: Float64Array.from(randomValues(16, 6)) };
	const draw: Draw = { budget: { value: 0.8, parent: false }, hard: false, noise: () => [0.3, -0.2] };
	const sample = sampleAxis(own, axis, weights, 4, draw);
	const [a, b] = sample.scaledLogits;
	expect(Math.abs(a! - b!)).toBeCloseTo(Math.SQRT2 * sample.saved.scale, 12);
	const gradient = { first: new Float64Array(16), second: new Float64Array(16) };
	addAxisGradient(sample, weights, [0.7, -0.4], gradient);
	expect([...gradient.first, ...gradient.second].every((d) => d === 0)).toBe(true);
});

test("without noise a sample is one-hot and has no gradient; a one-hot draw has that of its probabilities", () => {
	const axis: Axis = { name: "emb", sizes: [16, 8], layers: null };
	const weights = { first: Float64Array.from(randomValues(16, 1)), second: Float64Array.from(randomValues(16, 2)) };
	const quiet = sampleAxis(
		config,
		axis,
		weights,
		Number.POSITIVE_INFINITY,
		withoutNoise({ value: 0.5, parent: false }),
	);
	expect([...quiet.probabilities].sort()).toEqual([0, 1]);
	const gradient = { first: new Float64Array(16), second: new Float64Array(16) };
	addAxisGradient(quiet, weights, [1, 0], gradient);
	expect(gradient.second.every((x) => x === 0)).toBe(true);
	const hard = sampleAxis(config, axis, weights, 0, {
		budget: { value: 0.5, parent: false },
		hard: true,
		noise: () => [0.3, 0],
	});
	expect([...hard.probabilities].sort()).toEqual([0, 1]);
	addAxisGradient(hard, weights, [1, 0], gradient);
	expect(gradient.second.some((x) => x !== 0)).toBe(true);
});

describe("draws", () => {
	const drawn = { ...config, budgets: [0.8, 0.5, 0.3], budgetProbabilities: [5, 3, 2], parentProbability: 0.2 };

	test("have the frequencies that are asked for", () => {
		const counts = new Map<number, number>();
		const total = 4000;
		for (let iteration = 0; iteration < total / 4; iteration++) {
			for (let microbatch = 0; microbatch < 4; microbatch++) {
				const { value } = drawBudget(drawn, { iteration, microbatch }, 1);
				counts.set(value, (counts.get(value) ?? 0) + 1);
			}
		}
		const expected = new Map([
			[1, 0.2],
			[0.8, 0.4],
			[0.5, 0.24],
			[0.3, 0.16],
		]);
		const chiSquared = [...expected].reduce(
			(sum, [budget, share]) => sum + ((counts.get(budget) ?? 0) - share * total) ** 2 / (share * total),
			0,
		);
		// 3 degrees of freedom: 16.27 is passed once in a thousand.
		expect(chiSquared).toBeLessThan(16.27);
		expect([...counts.keys()].sort()).toEqual([0.3, 0.5, 0.8, 1]);
	});

	test("a budget of as many GB as 1 is the parent's no more than any other", () => {
		const use = { profile: memoryProfiles.bf16, batchSize: 1, sequenceLength: 128, prefillChunk: 128 };
		const gigabytes: ElasticConfig = {
			...drawn,
			budgets: [1, 0.5],
			budgetProbabilities: null,
			budget: { type: "mem", use },
		};
		const own = Array.from({ length: 50 }, (_, iteration) => drawBudget(gigabytes, { iteration, microbatch: 0 }, 2.5));
		for (const { value, parent } of own) expect(parent).toBe(value === 2.5);
		expect(new Set(own.map(({ value }) => value))).toEqual(new Set([1, 0.5, 2.5]));
	});

	test("repeat, and differ by axis, microbatch and lanes; budgets are the same in all lanes", () => {
		const axis = (name: "emb" | "mamba"): Axis => ({ name, sizes: [8, 6, 4], layers: null });
		const place = { iteration: 7, microbatch: 2, lanes: 0 };
		const noise = (at: typeof place, name: "emb" | "mamba" = "emb") => [
			...Array.from(drawFor(drawn, at, 1).noise!(axis(name))),
		];
		expect(noise(place)).toEqual(noise(place));
		const others = [
			noise(place, "mamba"),
			noise({ ...place, microbatch: 3 }),
			noise({ ...place, lanes: 1 }),
			noise({ ...place, iteration: 8 }),
		];
		for (const other of others) expect(other).not.toEqual(noise(place));
		expect(drawFor(drawn, { ...place, lanes: 5 }, 1).budget).toEqual(drawFor(drawn, place, 1).budget);
		const hard = Array.from(
			{ length: 2000 },
			(_, iteration) => drawFor({ ...drawn, hardThreshold: 0.9 }, { ...place, iteration }, 1).hard,
		);
		expect(hard.filter(Boolean).length / hard.length).toBeCloseTo(0.1, 1);
	});
});

describe("lists of sizes", () => {
	test("ratios are rounded down, one list is given, no list is the parent", () => {
		expect(sizesOf("emb", 1920, { ratios: [1, 0.71429, 0.51725], sizes: null })).toEqual([1920, 1371, 993]);
		expect(sizesOf("mlp", 64, { ratios: null, sizes: null })).toEqual([64]);
		expect(sizesOf("mlp", 64, { ratios: null, sizes: [64, 16] })).toEqual([64, 16]);
		expect(() => sizesOf("emb", 8, { ratios: [1], sizes: [8] })).toThrow(
			"emb-per-list and emb-int-list are both given; allowed is one of them, not both.",
		);
		expect(() => sizesOf("emb", 8, { ratios: [1, 1.5], sizes: null })).toThrow(
			"emb-per-list has 1.5; allowed are ratios from 0 to 1.",
		);
	});

	test("that cannot be trained are refused", () => {
		expect(sizesProblem("emb", [16, 8], model)).toBeNull();
		expect(sizesProblem("emb", [8, 4], model)).toBe("begins with 8; allowed is the parent's 16 first");
		expect(sizesProblem("emb", [16, 8, 8], model)).toBe("has 8 after 8; allowed are falling sizes");
		expect(sizesProblem("mamba", [8, 5], model)).toBe("has 5; allowed are multiples of mamba-num-groups (2)");
		expect(sizesProblem("moe_expert", [4, 1], model)).toBe("has 1; allowed are at least moe-router-topk (2)");
		expect(sizesProblem("head", [4, 3], model)).toBe("has 3; allowed are multiples of num-query-groups (2)");
		expect(sizesProblem("mlp", [8, 3], model, { expertTensor: 2 })).toBe(
			"has 3; allowed are multiples of the expert tensor parallelism (2)",
		);
		expect(rankingProblem([1, 1], 3)).toBe("has 1 twice");
		expect(rankingProblem([4], 3)).toBe("has 4; allowed are layers 0 to 2");
	});
});
