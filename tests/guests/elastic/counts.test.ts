/** Counts of parameters, memory and budget losses against the vectors of docs/spec/elastic.md §6–§8, and their gradients. */
import { describe, expect, test } from "bun:test";
import { rowsOf } from "../../../src/guests/elastic/axes.ts";
import type { ElasticConfig } from "../../../src/guests/elastic/config.ts";
import { type CountRule, countParameters, parentSizes, type Sizes } from "../../../src/guests/elastic/counts.ts";
import { memoryOf, memoryProfiles, resolveProfile } from "../../../src/guests/elastic/memory.ts";
import { budgetLoss, expectedSizes, parentBudget, usageOf } from "../../../src/guests/elastic/router/budget-loss.ts";
import {
	addAxisGradient,
	type Draw,
	type RouterSample,
	sampleAxis,
	withoutNoise,
} from "../../../src/guests/elastic/router/network.ts";
import type { HybridConfig } from "../../../src/models/language/config.ts";
import { randomValues } from "../../support.ts";
import { familyOf } from "./family-model.ts";
import { elasticModel, testElastic } from "./models.ts";

const count = (model: HybridConfig, target: "total" | "active", rule: CountRule, change: Partial<Sizes> = {}) =>
	countParameters(model, { ...parentSizes(model), ...change }, target, rule).value;

const small = (pattern: string, groups: number) =>
	elasticModel(pattern, {
		hidden: 4,
		vocabulary: 10,
		mamba: { heads: 4, headDim: 2, groups, stateDim: 2 },
		attention: { heads: 2, queryGroups: 1, headDim: 2 },
		moe: { experts: 2, topk: 1, ffn: 8, shared: 0 },
	});

const nano = elasticModel(`${"ME".repeat(23)}******`, {
	hidden: 2688,
	vocabulary: 131072,
	mamba: { heads: 64, headDim: 64, groups: 8, stateDim: 128 },
	attention: { heads: 32, queryGroups: 2, headDim: 128 },
	moe: { experts: 128, topk: 6, ffn: 1856, shared: 3712 },
});

const functional = elasticModel("MEM*EMEM*EME*", {
	hidden: 1024,
	vocabulary: 50432,
	mamba: { heads: 32, headDim: 64, groups: 8, stateDim: 128 },
	attention: { heads: 32, queryGroups: 2, headDim: 128 },
	moe: { experts: 32, topk: 2, ffn: 512, shared: 512 },
});

const every = (
	model: HybridConfig,
	[hidden, ffn, heads, experts]: readonly [number, number, number, number],
): Partial<Sizes> => ({
	hidden,
	ffn: model.pattern.map(() => ffn),
	mambaHeads: model.pattern.map(() => heads),
	experts: model.pattern.map(() => experts),
});

describe("counts", () => {
	test("of a small model, by layer", () => {
		const one = small("E", 8);
		expect(count({ ...one, pattern: [] }, "total", "exact")).toBe(84);
		expect(count({ ...one, pattern: [], tieWordEmbeddings: true }, "total", "exact")).toBe(44);
		expect([count(one, "total", "megatron") - 84, count(one, "active", "megatron") - 84]).toEqual([132, 68]);
		expect([count(one, "total", "exact") - 84, count(one, "active", "exact") - 84]).toEqual([140, 76]);
		expect(count(small("*", 8), "total", "exact") - 84).toBe(52);
		expect([8, 2, 1].map((groups) => count(small("M", groups), "total", "exact") - 84)).toEqual([464, 248, 212]);
		// Megatron's rule has 8 groups whatever the model has.
		expect(count(small("M", 1), "total", "megatron") - 84).toBe(464);
		const whole = small("MEM*E", 8);
		expect([count(whole, "total", "megatron"), count(whole, "active", "megatron")]).toEqual([1328, 1200]);
	});

	test("a pattern is its layers, and cuts between stages are none", () => {
		const layers = (pattern: string) => count(small(pattern, 2), "total", "exact") - 84;
		expect(layers("MEM*E-")).toBe(2 * layers("M") + 2 * layers("E") + layers("*") + layers("-"));
		expect(layers("-")).toBe(4 + 2 * 4 * small("-", 2).mlp.ffnHiddenSize);
		const parsed = (pattern: string) =>
			familyOf({ "hybrid-layer-pattern": pattern, "add-skipping": false, "layer-ranking-list": null });
		const [cut, whole] = [parsed("ME|*-").model, parsed("ME*-").model];
		expect(count(cut, "total", "exact")).toBe(count(whole, "total", "exact"));
		expect(() => parsed("MEX")).toThrow('"X" is not a layer symbol');
	});

	test("active parameters are fewer than all where tokens meet some experts, and the router's where they meet none", () => {
		const of = (topk: number, target: "total" | "active", rule: CountRule = "exact") => {
			const one = small("E", 8);
			return count({ ...one, moe: { ...one.moe, topk } }, target, rule) - 84;
		};
		expect(of(1, "active")).toBeLessThan(of(1, "total"));
		expect(of(2, "active")).toBe(of(2, "total"));
		// The norm, and but for Megatron's rule the router.
		expect([of(0, "active", "megatron"), of(0, "active")]).toEqual([4, 4 + 4 * 2]);
	});

	test("of Nemotron-3-Nano", () => {
		expect([count(nano, "total", "megatron"), count(nano, "active", "megatron")]).toEqual([
			31_427_958_208, 3_430_094_272,
		]);
		expect([count(nano, "total", "exact"), count(nano, "active", "exact")]).toEqual([31_577_937_344, 3_580_073_408]);
	});

	for (const [sizes, megatron, exact] of [
		[
			[1024, 512, 32, 32],
			[342_651_360, 185_364_960],
			[345_436_640, 188_150_240],
		],
		[
			[768, 384, 24, 24],
			[196_022_120, 131_141_480],
			[198_080_360, 133_199_720],
		],
		[
			[512, 256, 16, 16],
			[100_531_440, 82_181_360],
			[101_883_120, 83_533_040],
		],
	] as const) {
		test(`of Megatron's functional model at ${sizes}`, () => {
			const change = every(functional, sizes);
			const of = (rule: CountRule) =>
				(["total", "active"] as const).map((target) => count(functional, target, rule, change));
			expect(of("megatron")).toEqual([...megatron]);
			expect(of("exact")).toEqual([...exact]);
		});
	}

	test("have the gradient of their differences", () => {
		for (const target of ["total", "active"] as const)
			for (const rule of ["exact", "megatron"] as const)
				expectGradient(functional, (sizes) => countParameters(functional, sizes, target, rule));
	});
});

describe("memory", () => {
	const use = { profile: memoryProfiles.bf16, batchSize: 1, sequenceLength: 131072, prefillChunk: 16384 };

	test("of two models", () => {
		const parts = (model: HybridConfig, profile = memoryProfiles.bf16 as typeof use.profile) =>
			memoryOf(model, parentSizes(model), { ...use, profile }, "megatron");
		const { parts: of, value } = parts(functional);
		for (const [part, expected] of [
			[of.parameters, 0.345269],
			[of.kvCache, 0.375],
			[of.ssmCache, 0.002441],
			[of.buffer, 0.046875],
			[value, 0.769586],
		] as const)
			expect(part).toBeCloseTo(expected, 6);
		expect(parts(nano).value).toBeCloseTo(7.614635, 5);
		expect(parts(nano, memoryProfiles.fp8_all).value).toBeCloseTo(3.807317, 5);
	});

	test("has the gradient of its differences", () => {
		expectGradient(functional, (sizes) => memoryOf(functional, sizes, use));
	});

	test("profiles are those of docs/spec/elastic.md §7, all of active parameters", () => {
		const bytes = Object.entries(memoryProfiles).map(([name, { parameters, kvCache, ssmCache, buffer, target }]) => [
			...[name, parameters, kvCache, ssmCache, buffer, target],
		]);
		expect(bytes).toEqual([
			["bf16", 2, 2, 2, 2, "active"],
			["fp8_kv", 2, 1, 2, 2, "active"],
			["fp8_kv_ssm", 2, 1, 1, 2, "active"],
			["fp8_all", 1, 1, 1, 1, "active"],
			["int8", 1, 1, 1, 2, "active"],
			["fp4", 0.5625, 0.5625, 1, 2, "active"],
		]);
	});

	test("profiles: overrides stand above a preset, a preset above bf16", () => {
		expect(resolveProfile(null)).toEqual(memoryProfiles.bf16);
		expect(resolveProfile("fp8_kv", { kvCache: 4, target: "total" })).toEqual({
			...memoryProfiles.fp8_kv,
			kvCache: 4,
			target: "total",
		});
		expect(resolveProfile("own", {}, { own: { bpe_params: 3 } })).toEqual({ ...memoryProfiles.bf16, parameters: 3 });
		const megatron = { params: 1, kv_cache: 2, ssm_cache: 4, max_buffer: 8, param_budget_target: "total" };
		expect(resolveProfile("own", {}, { presets: { own: megatron } })).toEqual({
			...{ parameters: 1, kvCache: 2, ssmCache: 4, buffer: 8, target: "total" },
		});
		expect(() => resolveProfile("fp7")).toThrow(
			"memory-profile is fp7; allowed are bf16, fp8_kv, fp8_kv_ssm, fp8_all, int8, fp4.",
		);
		expect(() => resolveProfile("own", {}, { own: { param_budget_target: "both" } }, "p.yaml")).toThrow(
			'p.yaml: own.param_budget_target is "both"; allowed is active or total.',
		);
	});
});

/** Central differences of every size that a layer reads; the functions are linear in single sizes but for the soft maximum. */
function expectGradient(model: HybridConfig, f: (sizes: Sizes) => { value: number; gradient: Sizes }): void {
	const at = parentSizes(model);
	for (const [layer] of model.pattern.entries()) {
		at.keep[layer] = 0.5 + layer / 40;
		at.ffn[layer]! += layer * 1e-3;
	}
	const { gradient } = f(at);
	const check = (change: (by: number) => void, expected: number) => {
		const step = 1e-4;
		change(step);
		const above = f(at).value;
		change(-2 * step);
		const below = f(at).value;
		change(step);
		const scale = Math.max(Math.abs(expected), 1e-3 * Math.abs(above));
		expect(Math.abs((above - below) / (2 * step) - expected) / scale).toBeLessThan(1e-4);
	};
	check((by) => {
		at.hidden += by;
	}, gradient.hidden);
	for (const key of ["mambaHeads", "ffn", "experts", "heads", "keep"] as const)
		for (const layer of model.pattern.keys())
			check((by) => {
				at[key][layer]! += by;
			}, gradient[key][layer]!);
}

describe("the budget loss", () => {
	const config = testElastic(functional, {
		emb: [1024, 768, 512],
		mlp: [512, 384, 256],
		mamba: [32, 24, 16],
		moe_expert: [32, 24, 16],
	});
	const compat: ElasticConfig = { ...config, compat: true };
	const uniform = (of: ElasticConfig): RouterSample =>
		new Map(
			of.axes.map((axis) => {
				const weights = { first: new Float64Array(of.router.width), second: new Float64Array(3 * of.router.width) };
				const one = sampleAxis({ ...of, budgets: [1] }, axis, weights, 0, withoutNoise({ value: 1, parent: true }));
				return [axis.name, { ...one, probabilities: new Float64Array(3).fill(1 / 3) }];
			}),
		);

	test("forgives a small difference, and pulls the parent's budget to the parent's sizes", () => {
		expect(budgetLoss(compat, functional, { value: 0.697, parent: false }, uniform(compat)).value).toBe(0);
		const full = budgetLoss(compat, functional, { value: 1, parent: true }, uniform(compat)).value;
		expect(full).toBeCloseTo(9.181412, 6);
	});

	test("counts a difference from 5 % on, and less than that for the parent's budget alone", () => {
		const sample = uniform(config);
		const usage = usageOf(config, functional, expectedSizes(config, functional, sample)).value;
		const lossAt = (difference: number, parent: boolean) =>
			budgetLoss(config, functional, { value: usage / (1 + difference), parent }, sample);
		for (const difference of [0.0499, -0.0499]) {
			const { value, gradient } = lossAt(difference, false);
			expect(value).toBe(0);
			expect([...gradient.values()].every((d) => d.every((x) => x === 0))).toBe(true);
			const parent = lossAt(difference, true).value;
			expect(parent - lossAt(2 * difference, true).value).toBeCloseTo(-Math.abs(difference), 9);
		}
		for (const difference of [0.0501, -0.0501])
			expect(lossAt(difference, false).value).toBeCloseTo(Math.abs(difference), 9);
	});

	test("has the gradient of its differences", () => {
		for (const budget of [
			{ value: 1, parent: true },
			{ value: 0.3, parent: false },
		]) {
			const sample = uniform(config);
			const { gradient } = budgetLoss(config, functional, budget, sample);
			for (const [name, { probabilities }] of sample) {
				for (const at of probabilities.keys()) {
					const step = 1e-5;
					probabilities[at]! += step;
					const above = budgetLoss(config, functional, budget, sample).value;
					probabilities[at]! -= 2 * step;
					const below = budgetLoss(config, functional, budget, sample).value;
					probabilities[at]! += step;
					expect((above - below) / (2 * step)).toBeCloseTo(gradient.get(name)![at]!, 6);
				}
			}
		}
	});

	test("has the gradient of its differences for every weight of the router, noise and all", () => {
		const axes = [
			...config.axes.slice(0, 1),
			{ ...config.axes[1]!, layers: [0, 2, 5, 7, 10] },
			...config.axes.slice(2),
		];
		const own: ElasticConfig = { ...config, axes, temperature: { initial: 0.8, decay: 1 } };
		const weights = new Map(
			axes.map((axis, at) => [
				axis.name,
				{
					first: Float64Array.from(randomValues(own.router.width * 2, at)),
					second: Float64Array.from(randomValues(rowsOf(axis) * 3 * own.router.width, 10 + at)),
				},
			]),
		);
		for (const value of [1, 0.5]) {
			const draw: Draw = {
				budget: { value, parent: value === 1 },
				hard: false,
				noise: (axis) => randomValues(rowsOf(axis) * 3, axis.name.length),
			};
			const sampled = (): RouterSample =>
				new Map(axes.map((axis) => [axis.name, sampleAxis(own, axis, weights.get(axis.name)!, 3, draw)]));
			const loss = () => budgetLoss(own, functional, draw.budget, sampled());
			const { gradient } = loss();
			for (const [name, one] of sampled()) {
				const { first, second } = weights.get(name)!;
				const analytic = { first: new Float64Array(first.length), second: new Float64Array(second.length) };
				addAxisGradient(one, { first, second }, gradient.get(name)!, analytic);
				for (const [matrix, d] of [
					[first, analytic.first],
					[second, analytic.second],
				] as const)
					for (const at of matrix.keys()) {
						const step = 1e-5;
						matrix[at]! += step;
						const above = loss().value;
						matrix[at]! -= 2 * step;
						const below = loss().value;
						matrix[at]! += step;
						expect(Math.abs((above - below) / (2 * step) - d[at]!)).toBeLessThan(
							1e-4 * Math.max(1e-3, Math.abs(d[at]!)),
						);
					}
			}
		}
	});

	test("in GB compares memory, and the parent's own budget is its memory", () => {
		const use = { profile: memoryProfiles.bf16, batchSize: 1, sequenceLength: 131072, prefillChunk: 16384 };
		const gigabytes: ElasticConfig = { ...compat, budget: { type: "mem", use } };
		expect(parentBudget(gigabytes, functional)).toBeCloseTo(0.769586, 6);
		expect(usageOf(config, functional, parentSizes(functional)).value).toBe(1);
		const half = budgetLoss(gigabytes, functional, { value: 0.3, parent: false }, uniform(gigabytes));
		const usage = usageOf(gigabytes, functional, half.expected).value;
		expect(half.value).toBeCloseTo(usage / 0.3 - 1, 12);
	});
});
