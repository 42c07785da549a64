/**
 * Selective recomputation and offloading: no bit changes, every module takes less memory, and both work with the other features of
 * a stage.
 */

import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { layerSymbols } from "../../src/config/hybrid-pattern.ts";
import {
	type OffloadModule,
	offloadModules,
	type RecomputeModule,
	recomputeModuleNames,
	recomputeModules,
} from "../../src/config/recompute-modules.ts";
import type { Device } from "../../src/native/device.ts";
import { testDevice } from "../support.ts";
import { batch, Training, tiny } from "./training.ts";

let device: Device;
let baseline: number;
beforeAll(async () => {
	// One thread: each takes scratch memory while it works, so with several the peak would depend on their timing.
	device = await testDevice(1);
});
afterAll(() => device[Symbol.dispose]());
beforeEach(() => {
	baseline = device.memoryStatistics().liveBytes;
});
afterEach(() => expect(device.memoryStatistics().liveBytes).toBe(baseline));

const options = {
	"hybrid-layer-pattern": "ME*-M",
	"hidden-dropout": 0.1,
	"attention-dropout": 0.1,
	"moe-z-loss-coeff": 1e-3,
	"moe-router-load-balancing-type": ["seq_aux_loss", "global_aux_loss"],
	"moe-aux-loss-coeff": [1e-2, 1e-2],
};
const selective = (modules: readonly RecomputeModule[]) => ({
	"recompute-granularity": "selective",
	"recompute-modules": modules,
});

const offloaded = (modules: readonly OffloadModule[]) => ({
	"fine-grained-activation-offloading": true,
	"offload-modules": modules,
	"min-offloaded-tensor-size": 0,
});

/** Losses, norms, all gradients of the last step and all weights after it. */
async function run(keys: Record<string, unknown>, late = false) {
	using training = await Training.open(tiny({ ...options, ...keys }), device, { lateWeightGradients: late });
	training.run.state.optimizer.refreshMasters();
	const results = [0, 1].map((step) => training.step(batch(2, step + 1), step));
	const gradients = [...training.run.language!.parameters].flatMap(({ mainGradient }) => [
		...(mainGradient?.toFloat32() ?? []),
	]);
	return { results, gradients, weights: training.weights() };
}

// Models of attention by latents are recomputed in tests/parallel/language.test.ts.
const modulesHere = recomputeModuleNames.filter((module) => module !== "mla_up_proj");
const cases = [...modulesHere.map((module) => [module]), recomputeModuleNames];
for (const [kind, keys] of [
	["fp32", {}],
	[
		"bf16, gated, rotary, sinks",
		{
			...{ bf16: true, "squared-relu": false, swiglu: true },
			...{ "position-embedding-type": "rope", "softmax-type": "learnable" },
		},
	],
	[
		"multi-token prediction",
		{ "hybrid-layer-pattern": "M*-/ME*", "moe-router-load-balancing-type": ["none"], "moe-aux-loss-coeff": [0] },
	],
	["adapters", { "lora-rank": 2, "lora-dropout": 0.1, "moe-fused-mlp": "off" }],
] as const) {
	describe(`no bit changes: ${kind}`, () => {
		let plain: Awaited<ReturnType<typeof run>>;
		let late: Awaited<ReturnType<typeof run>>;
		beforeAll(async () => {
			plain = await run(keys);
			late = await run(keys, true);
		});
		test("without recomputation late weight gradients are the immediate ones", () => expect(late).toEqual(plain));
		for (const modules of cases) {
			test(modules.join(" "), async () => {
				expect(await run({ ...keys, ...selective(modules) })).toEqual(plain);
				expect(await run({ ...keys, ...selective(modules) }, true)).toEqual(plain);
			});
		}
		test("inputs of experts in the host's memory, alone and beside recomputation", async () => {
			expect(await run({ ...keys, ...offloaded(offloadModules) })).toEqual(plain);
			expect(await run({ ...keys, ...offloaded(offloadModules), ...selective(["moe_act"]) }, true)).toEqual(plain);
		});
	});
}

describe("memory at the peak is less", () => {
	/** Peak of a step of a model whose layers all have the module. */
	const peak = async (module: RecomputeModule, modules: readonly RecomputeModule[]) => {
		const pattern = { "hybrid-layer-pattern": layerSymbols[recomputeModules[module].layers[0]].repeat(6) };
		// Experts as one operation keep no activation anyway.
		const fused = { "moe-fused-mlp": module === "moe_act" ? "off" : "auto" };
		const keys = { ...options, ...pattern, ...fused, ...(modules.length > 0 && selective(modules)) };
		using training = await Training.open(tiny(keys), device);
		device.resetPeakMemory();
		training.step(batch(1));
		return device.memoryStatistics().peakBytes;
	};
	for (const module of modulesHere) {
		test(`${module}, and no more with all others beside it`, async () => {
			const [plain, alone, all] = [
				await peak(module, []),
				await peak(module, [module]),
				await peak(module, recomputeModuleNames),
			];
			expect(alone).toBeLessThan(plain);
			expect(all).toBeLessThanOrEqual(alone);
		});
	}
});

describe("memory at the peak is less with the input in the host's memory", () => {
	for (const fused of ["off", "auto"]) {
		test(`experts as one operation: ${fused}`, async () => {
			const peak = async (keys: Record<string, unknown>) => {
				const model = { ...options, "hybrid-layer-pattern": "EEEEEE", "moe-fused-mlp": fused };
				using training = await Training.open(tiny({ ...model, ...keys }), device);
				device.resetPeakMemory();
				training.step(batch(1));
				return device.memoryStatistics().peakBytes;
			};
			const plain = await peak({});
			const both = await peak(offloaded(offloadModules));
			for (const module of offloadModules) {
				const one = await peak(offloaded([module]));
				expect(one).toBeLessThan(plain);
				expect(both).toBeLessThan(one);
			}
			expect(await peak({ ...offloaded(offloadModules), "min-offloaded-tensor-size": 2 ** 20 })).toBe(plain);
		});
	}
});

test("unset modules are core_attn", async () => {
	const { recompute } = tiny({ "recompute-granularity": "selective" });
	expect(recompute).toEqual({ granularity: "selective", modules: ["core_attn"] });
});
