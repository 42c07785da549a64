/** The plan against real runs: memory of the CPU library's allocator, operations of the published models. */
import { expect, setDefaultTimeout, test } from "bun:test";
import { recomputeModuleNames } from "../../src/config/recompute-modules.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import type { Key } from "../../src/config/schema.ts";
import { countFlopsPerToken, countParameters } from "../../src/models/language/counts.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { acceleratorRates } from "../../src/plan/accelerators.ts";
import { estimateStep, rankSeconds } from "../../src/plan/estimate.ts";
import { planRank } from "../../src/plan/rank-plan.ts";
import { microbatchesOf, openRank } from "../../src/plan/rank-run.ts";
import { processorRates, type Rates, secondsOf } from "../../src/plan/rates.ts";
import { type Machine, planRun } from "../../src/plan/run-plan.ts";

// Hundreds of thousands of operations are counted one by one, on a machine that others use too.
setDefaultTimeout(60_000);

type Keys = Readonly<Partial<Record<Key, unknown>>>;

const text: Keys = { preset: "nemotron-tiny" };
const latents: Keys = {
	...{ ...text, "hybrid-layer-pattern": "+E+-", "num-query-groups": 4, "qk-layernorm": true, "q-lora-rank": 48 },
	...{ "recompute-granularity": "selective", "recompute-modules": ["mla_up_proj"] },
};
const images: Keys = { preset: "nemotron-vlm-tiny", "train-iters": 200 };
const packs: Keys = {
	...{ ...images, "dynamic-resolution": true, "dataset-provider": "energon", "data-path": "set" },
	...{ "packing-buffer-size": 8, "pixel-shuffle": true, "disable-vision-class-token": true },
};
const counting = { kind: "cpu", imbalance: 1 } as const;
const nobody = { phase() {}, transfer() {} };

const inE4m3: Keys = {
	...{ ...text, device: "cpu", bf16: true },
	...{ "fp8-format": "e4m3", "fp8-recipe": "blockwise", "fp8-emulate": true },
};

const layouts: readonly (readonly [name: string, keys: Keys, rank: number, share?: number])[] = [
	["one rank", text, 0],
	["projections of multi-latent attention recomputed", latents, 0],
	["layers recomputed", { ...text, "recompute-granularity": "full" }, 0],
	["experts in e4m3, layers recomputed", { ...inE4m3, "recompute-granularity": "full" }, 0],
	["experts and their weight gradients in e4m3", { ...inE4m3, "fp8-wgrad": true }, 0],
	["tensor parallel", { ...text, "llm-tp": 2 }, 1],
	["ZeRO-1 over two lanes", { ...text, "llm-tp": 2, "llm-dp": 2, "use-distributed-optimizer": true }, 3],
	[
		"moments and sums of gradients in bf16, ZeRO-1 over two lanes",
		{
			...{ ...text, "llm-dp": 2, "use-distributed-optimizer": true },
			...{ "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16", "grad-reduce-in-bf16": true },
		},
		1,
	],
	[
		"low-rank adapters, tensor parallel, ZeRO-1",
		{ ...text, "lora-rank": 4, "llm-tp": 2, "llm-dp": 2, "use-distributed-optimizer": true },
		3,
	],
	["encoder rank of disjoint grids", { ...images, "encoder-tp": 2, "llm-dp": 2 }, 1],
	["first stage of an encoder", { ...images, "encoder-pp": 3, "global-batch-size": 12 }, 0],
	["last stage of an encoder with a frozen tower", { ...images, "encoder-pp": 3, "freeze-vit": true }, 2],
	["packs full of pictures, both modules on a rank", { ...packs, "llm-offset": 0 }, 0],
	["packs of bounded pictures, encoder rank", { ...packs, "packing-max-patches": 300 }, 0],
	["language rank of disjoint grids", { ...images, "encoder-dp": 2, "llm-tp": 2 }, 2],
	[
		"last stage with late weight gradients",
		{ ...text, "llm-pp": 2, "hybrid-layer-pattern": "ME*|-ME", "delay-wgrad-compute": true },
		1,
	],
];

const ofText = recomputeModuleNames.filter((module) => module !== "mla_up_proj");
const selective = [...ofText.map((module) => [module]), recomputeModuleNames].map(
	(modules) =>
		[
			`recomputed: ${modules.join(" ")}`,
			{ ...text, "recompute-granularity": "selective", "recompute-modules": modules },
			0,
			0.02,
		] as const,
);

for (const [name, keys, rank, share = 0.05] of [...layouts, ...selective]) {
	test(`memory within ${100 * share} % of the allocator's peak: ${name}`, async () => {
		const c = configurationOf(keys);
		const { memory } = await planRank(c, rank, counting);
		using device = Device.open(await openLibrary("cpu"), { threads: 1 });
		{
			using run = await openRank(c, device, rank, { ...nobody, imbalance: 1 });
			const { parameter, gradient, optimizer } = device.memoryStatistics().liveBytesByTag;
			run.initialise();
			run.step(Math.min(3, microbatchesOf(c)), "fullest");
			const { peakBytes } = device.memoryStatistics();
			expect(memory).toMatchObject({ parameters: parameter, gradients: gradient, optimizer });
			expect(Math.abs(memory.peak / peakBytes - 1)).toBeLessThan(share);
		}
		expect(device.memoryStatistics().liveBytes).toBe(0);
	});
}

const machine: Machine = {
	rates: acceleratorRates("h100").rates,
	kind: "cuda",
	memoryBytes: 80e9,
	ranksPerHost: 8,
	imbalance: 1,
};
const twenty: Keys = {
	preset: "nemotron-20l",
	"model-provider": "nemotron-moe-vlm",
	"pixel-shuffle": true,
	"disable-vision-class-token": true,
	"use-distributed-optimizer": true,
};

test("operations of the 20-layer model are those that are counted by hand; backward costs twice forward", async () => {
	const c = configurationOf({ ...twenty, "llm-tp": 2, "llm-dp": 2, "llm-ep": 4, "encoder-dp": 2 });
	const { modules, microbatches } = await planRun(c, machine);
	const language = modules[1]!;
	const { layer } = countFlopsPerToken(c);
	expect(microbatches).toBe(4);
	// The router's product is fp32 and the convolution belongs to no product: both are in the count by hand too.
	const byHand = countFlopsPerToken(c).forward * c.seqLength * c.globalBatchSize;
	expect(layer.mamba).toBeGreaterThan(0);
	expect(Math.abs(language.flops.forward / byHand - 1)).toBeLessThan(0.005);
	expect(Math.abs(language.flops.backward / language.flops.forward - 2)).toBeLessThan(0.01);
	// Both lanes' rows cross the edge, a token's row is hidden-size bf16 numbers; as many come back.
	const rows = (c.globalBatchSize * 49) / 2;
	const bridge = modules[0]!.traffic.find(({ group }) => group === "edge.radio_encoder.forward")!;
	// Both tensor-parallel ranks of a lane get them.
	expect(bridge.bytes).toBeCloseTo(2 * (rows * c.hiddenSize * 2 + 4 * microbatches), -2);
	// Every rank sends ¾ of its gradient slices to the other three replicas of the experts' two lanes: ZeRO-1 halves state.
	const whole = await planRun(
		configurationOf({
			...twenty,
			"llm-tp": 2,
			"llm-dp": 2,
			"llm-ep": 4,
			"encoder-dp": 2,
			"use-distributed-optimizer": false,
		}),
		machine,
	);
	expect(language.memory.optimizer).toBeLessThan(whole.modules[1]!.memory.optimizer);
	expect(language.recomputed!.activations).toBeLessThan(language.memory.activations / 2);
});

test("packs full of pictures decide on memory, not on times, and packing-max-patches bounds them", async () => {
	const packed = { ...twenty, "llm-offset": 0, "llm-tp": 2, "llm-ep": 2, "encoder-tp": 2, "dynamic-resolution": true };
	const energon = { ...packed, "dataset-provider": "energon", "data-path": "set", "packing-buffer-size": 200 };
	const peakAndTime = async (keys: Keys) => {
		const { modules, packedPatches, step } = await planRun(configurationOf(keys), machine);
		return { peak: modules[0]!.memory.peak, packedPatches, seconds: step.seconds };
	};
	const mock = await peakAndTime(packed);
	const full = await peakAndTime(energon);
	// A mock sequence has one picture of half its tokens.
	const half = await peakAndTime({ ...energon, "packing-max-patches": 16384 });
	expect([mock.packedPatches, full.packedPatches, half.packedPatches]).toEqual([null, 4 * 8191, 16384]);
	expect(full.peak).toBeGreaterThan(1.05 * mock.peak);
	expect(Math.abs(half.peak / mock.peak - 1)).toBeLessThan(0.01);
	expect([full.seconds, half.seconds]).toEqual([mock.seconds, mock.seconds]);
});

test("the production layout: 264 ranks are planned from one rank of each module", async () => {
	const c = configurationOf({
		...twenty,
		"encoder-dp": 8,
		"llm-tp": 2,
		"llm-dp": 128,
		"llm-ep": 8,
		"global-batch-size": 768,
	});
	const plan = await planRun(c, machine);
	expect(plan.worldSize).toBe(264);
	const [encoder, language] = plan.modules;
	expect([encoder!.ranks, language!.ranks]).toEqual([8, 256]);
	const groups = Object.fromEntries(language!.traffic.map((one) => [one.group, one]));
	expect(groups["language.dp"]).toMatchObject({ members: 128, betweenHosts: true });
	expect(groups["language.tp_ep"]).toMatchObject({ members: 8, betweenHosts: false });
	expect(plan.step.seconds).toBeGreaterThan(0.5);
	expect(plan.step.modules.every(({ idle }) => idle >= 0 && idle < 1)).toBe(true);
});

test("experts on two nodes: fewer bytes leave a node where rows go there once", async () => {
	const layout = { ...twenty, "llm-tp": 1, "llm-dp": 16, "llm-ep": 16, "encoder-dp": 16, "llm-offset": 0 };
	const traffic = async (values: Readonly<Record<string, unknown>>) => {
		const c = configurationOf({ ...layout, "global-batch-size": 16, ...values });
		const { modules } = await planRun(c, { ...machine, ranksPerHost: 8 });
		return { c, groups: modules[0]!.traffic.filter(({ group }) => group.startsWith("language.tp_ep")) };
	};
	const { c, groups: direct } = await traffic({});
	const { groups: nodes } = await traffic({ "moe-token-dispatcher-type": "flex" });
	const layers = [...c.hybridLayerPattern].filter((symbol) => symbol === "E").length;
	const [{ numExperts: experts, moeRouterTopk: topk }, row] = [c, 2 * c.hiddenSize];
	// There and back, rows and gradients; a probability, or a token's routing, goes one way of each.
	const bytes = (rows: number, beside: number) => layers * c.seqLength * rows * (4 * row + 2 * beside);
	expect(direct.length).toBe(1);
	expect(Math.abs(direct[0]!.networkBytes / bytes(topk / 2, 4) - 1)).toBeLessThan(0.01);
	const between = nodes.find(({ group }) => group.endsWith("between_nodes"))!;
	const within = nodes.find(({ group }) => group.endsWith("within_node"))!;
	let without = 1;
	for (let k = 0; k < topk; k++) without *= (experts / 2 - k) / (experts - k);
	expect(Math.abs(between.networkBytes / bytes(1 - without, 8 * topk) - 1)).toBeLessThan(0.01);
	expect([within.networkBytes, within.betweenHosts, nodes.length]).toEqual([0, false, 2]);
});

test("a step is the slower module's work and the pipeline's ends", async () => {
	const c = configurationOf({ ...twenty, "encoder-dp": 2, "llm-dp": 2, "llm-ep": 2 });
	const plan = await planRun(c, machine);
	const [encoder, language] = plan.step.modules;
	const seconds = (module: number) => rankSeconds(plan.modules[module]!.plan, machine.rates, 8);
	expect(language!.forward).toBe(seconds(1).forward);
	// The language model begins when it has updated itself and the first rows have come; the encoder's last backward pass
	// comes after its last one.
	const there = encoder!.update + encoder!.forward;
	const begin = Math.max(language!.update, there);
	const passes = begin + plan.microbatches * (language!.forward + language!.backward);
	const end = passes + Math.max(language!.reduce, encoder!.backward + encoder!.reduce);
	expect(plan.step.seconds).toBeGreaterThan(end * (1 - 1e-9));
	expect(plan.step.seconds).toBeLessThan(end + encoder!.bridge + language!.bridge);
	expect(encoder!.idle).toBeGreaterThan(language!.idle);
	// Four ranks on one core take the time of all their work.
	const shape = {
		...{
			microbatches: plan.microbatches,
			pipeline: "language",
			stages: 1,
			virtualStages: 1,
			groupSize: 1,
			forwardOnly: false,
		},
		lateWeightGradients: false,
		overlap: null,
		encoders: [{ name: "radio_encoder", colocated: false, trains: [true] }],
	};
	const cores: Rates = { ...machine.rates, cores: 1, threads: 1 };
	const crowded = estimateStep(plan.modules, { rates: cores, ranksPerHost: 8, shape, together: () => null });
	expect(crowded.limitedByCores).toBe(true);
	expect(crowded.seconds).toBeGreaterThan(1.5 * plan.step.seconds);
});

test("encoder lanes that take microbatches in turn share out operations and transfers", async () => {
	const keys = { ...twenty, "encoder-tp": 2, "micro-batch-size": 1, "global-batch-size": 8 };
	const plan = async (lanes: number) => {
		const c = configurationOf({ ...keys, "encoder-dp": lanes });
		const [encoder] = (await planRun(c, machine)).modules;
		return { encoder: encoder!, seconds: rankSeconds(encoder!.plan, machine.rates, 8) };
	};
	const [alone, inTurns] = [await plan(1), await plan(4)];
	expect(inTurns.encoder.flops).toEqual(alone.encoder.flops);
	for (const group of ["radio_encoder.tp", "edge.radio_encoder.forward"]) {
		const of = ({ encoder }: typeof alone) => encoder.traffic.find((one) => one.group === group)!;
		expect(of(inTurns).bytes).toBeCloseTo(of(alone).bytes / 4, 0);
		expect(of(inTurns).transfers).toBe(of(alone).transfers / 4);
	}
	for (const part of ["forward", "backward"] as const) {
		expect(inTurns.seconds[part] / alone.seconds[part]).toBeCloseTo(1 / 4, 2);
	}
});

test("late weight gradients: the same work in less time, on no stage more memory than the first one has anyway", async () => {
	const stages = { ...text, "llm-pp": 4, "hybrid-layer-pattern": "ME*-|ME*-|ME*-|ME*-", "global-batch-size": 32 };
	const plan = (late: boolean) => planRun(configurationOf({ ...stages, "delay-wgrad-compute": late }), machine);
	const [immediate, late] = [await plan(false), await plan(true)];
	expect(late.modules.map(({ flops }) => flops)).toEqual(immediate.modules.map(({ flops }) => flops));
	const seconds = late.modules.map(({ plan }) => rankSeconds(plan, machine.rates, 8));
	for (const [at, { plan }] of immediate.modules.entries()) {
		expect(seconds[at]!.backward).toBeCloseTo(rankSeconds(plan, machine.rates, 8).backward, 9);
		expect(plan.phases["weight gradient"].operations).toEqual([]);
	}
	expect(late.step.seconds).toBeLessThan(0.97 * immediate.step.seconds);
	const first = immediate.modules[0]!.memory.activations;
	for (const { memory } of late.modules) expect(memory.activations).toBeLessThan(1.15 * first);
});

test("low-rank adapters: beside their memory that of training every weight", async () => {
	const plan = (keys: Keys) => planRun(configurationOf({ ...text, ...keys }), machine);
	const [full, adapted] = [await plan({}), await plan({ "lora-rank": 4 })];
	const [{ memory, withoutAdapters, plan: rank }] = adapted.modules as [(typeof adapted.modules)[number]];
	expect(full.modules[0]!.withoutAdapters).toBeNull();
	expect(withoutAdapters).toEqual(full.modules[0]!.memory);
	const { adapters } = countParameters(configurationOf({ ...text, "lora-rank": 4 }));
	expect(memory.gradients).toBeGreaterThanOrEqual(4 * adapters);
	expect(memory.gradients).toBeLessThan(1.05 * 4 * adapters);
	expect(memory.optimizer).toBeLessThan(1.05 * 8 * adapters);
	expect(memory.activations).toBeLessThan(withoutAdapters!.activations);
	// No gradients of weights, but for those of the adapters.
	expect(rank.phases.backward.flops).toBeLessThan(0.75 * full.modules[0]!.plan.phases.backward.flops);
});

test("an operation's time lies between the timed ones", () => {
	const rates: Rates = {
		...processorRates(2, 1),
		call: 0,
		operations: {
			gemm: [
				{ amount: 100, seconds: 1 },
				{ amount: 10000, seconds: 25 },
			],
		},
	};
	const seconds = (amount: number) => secondsOf({ name: "gemm", amount, calls: 2 }, rates);
	expect(seconds(100)).toBe(2);
	expect(seconds(1000)).toBeCloseTo(10, 9);
	expect(seconds(20000)).toBe(100);
	expect(seconds(80)).toBeLessThan(2);
	expect(secondsOf({ name: "add", amount: 5e9, calls: 1 }, rates)).toBeCloseTo(1, 9);
});

test("matrices are rounded to e4m3 once a step, and products in e4m3 have rates of their own", async () => {
	const { phases, memory } = await planRank(configurationOf({ ...inE4m3, "global-batch-size": 32 }), 0, counting);
	const calls = (phase: keyof typeof phases, name: string) =>
		phases[phase].operations.filter((one) => one.name === name).reduce((sum, one) => sum + one.calls, 0);
	expect(calls("prepare", "e4m3_matrices")).toBe(4);
	expect(calls("forward", "e4m3_matrices")).toBe(0);
	expect([calls("forward", "grouped_mlp_forward e4m3"), calls("backward", "grouped_mlp_backward e4m3")]).toEqual([
		2, 2,
	]);
	expect(calls("forward", "grouped_mlp_forward")).toBe(0);
	expect(calls("backward", "grouped_gemm_weight_gradient")).toBe(4);
	const all = await planRank(configurationOf({ ...inE4m3, "fp8-wgrad": true, "global-batch-size": 32 }), 0, counting);
	const names = all.phases.backward.operations.map(({ name }) => name);
	expect(names).toContain("grouped_gemm_weight_gradient e4m3 alone");
	expect(names).not.toContain("grouped_gemm_weight_gradient");
	expect(names).toContain("grouped_mlp_backward e4m3 alone");
	// The layer rounds rows that an exchange has written.
	const exchanged = { ...inE4m3, "llm-dp": 2, "llm-ep": 2, "moe-token-dispatcher-type": "alltoall" };
	const ofTwo = await planRank(configurationOf({ ...exchanged, "global-batch-size": 32 }), 0, counting);
	expect(ofTwo.phases.forward.operations.map(({ name }) => name)).toContain("grouped_mlp_forward e4m3 rounding");
	// Experts keep their rows in e4m3 alone.
	expect(all.memory.activations).toBeLessThan(memory.activations);
	const { rates } = acceleratorRates("h200");
	const seconds = (name: "grouped_mlp_forward" | "grouped_mlp_forward e4m3") =>
		secondsOf({ name, amount: 1e12, calls: 1 }, rates);
	expect(seconds("grouped_mlp_forward e4m3")).toBeLessThan(seconds("grouped_mlp_forward"));
	// Permutations write rows rounded too: x forward, dy backward.
	const inBf16 = { ...text, device: "cpu", bf16: true, "global-batch-size": 32 };
	const plain = await planRank(configurationOf(inBf16), 0, counting);
	for (const phase of ["forward", "backward"] as const) {
		const moved = (of: typeof phases) =>
			of[phase].operations.filter((one) => one.name === "moe_permute").reduce((sum, one) => sum + one.amount, 0);
		expect(moved(phases)).toBeGreaterThan(moved(plain.phases));
		expect(moved(all.phases)).toBeLessThan(moved(plain.phases));
	}
});
