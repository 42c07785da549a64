/** Flat optimizer buffers of a pipeline: which parameters a stage's buffer holds follows from its size and its weights. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { ValueStore } from "../../../src/checkpoint/model-store.ts";
import { readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { registrationOrder, shardOf } from "../../../src/checkpoint/torch-dist/metadata.ts";
import { optimizerBuffers } from "../../../src/checkpoint/torch-dist/optimizer-buffers.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import type { Device } from "../../../src/native/device.ts";
import { testDevice } from "../../support.ts";
import { memoryStore } from "../memory-store.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const embedding = "language_model.embedding.word_embeddings.weight";

function modelOf(pattern: string, tied: boolean): TensorStore {
	const c = configurationOf({
		...{ preset: "nemotron-tiny", "hybrid-layer-pattern": pattern, "hidden-size": 16, "vocab-size": 32 },
		...{ "kv-channels": 4, "mamba-num-heads": 4, "mamba-head-dim": 8, "mamba-state-dim": 4, "mamba-num-groups": 2 },
		...{ "ffn-hidden-size": 24, "num-experts": 4, "moe-ffn-hidden-size": 8, "make-vocab-size-divisible-by": 32 },
		...{ "moe-shared-expert-intermediate-size": 8, "untie-embeddings-and-output-weights": !tied },
	});
	using model = new HybridModel(device, hybridConfig(c), { frozen: false });
	model.initialise(7);
	return new ValueStore("model", model);
}

interface Grid {
	/** Layers of every segment, in order: a multiple of the stages. */
	readonly segments: readonly number[];
	readonly stages: number;
	/** Tensor-parallel ranks, and expert-parallel ones, of a stage. */
	readonly tensor: number;
	readonly experts: number;
}

/** The buffers that Megatron's distributed optimizer would write: `exp_avg` is twice the weights, `exp_avg_sq` three times. */
function buffersOf(model: TensorStore, { segments, stages, tensor, experts }: Grid, tied: boolean): TensorStore {
	const names = [...model.tensors.keys()].filter((name) => !name.endsWith(".expert_bias"));
	const layer = (name: string) => Number(/layers\.(\d+)\./.exec(name)?.[1] ?? Number.NaN);
	const isExpert = (name: string) => name.includes("mlp.experts.linear_fc");
	const values = new Map<string, Float32Array>();
	let begin = 0;
	for (const [segment, length] of segments.entries()) {
		const [first, last] = [segment === 0, segment === segments.length - 1];
		const own = names.filter((name) => {
			const at = layer(name);
			if (!Number.isNaN(at)) return at >= begin && at < begin + length;
			return name === embedding ? first : last;
		});
		begin += length;
		const ordered = registrationOrder(own)!.reverse();
		const write = (chain: number, rank: number, parts: readonly Float32Array[]) => {
			const starts: number[] = [];
			let end = 0;
			for (const part of parts) {
				starts.push(Math.ceil(end / 64) * 64);
				end = starts.at(-1)! + part.length;
			}
			if (parts.length === 0) return;
			const key = `mimo.language.chained_${chain}.optimizer.distributed.dp_group_idx_${rank}.gbuf_idx_${Math.floor(segment / stages)}.dtype_(torch.float32, torch.float32).bucket_idx_0.`;
			for (const [state, factor] of [
				["param", 1],
				["exp_avg", 2],
				["exp_avg_sq", 3],
			] as const) {
				const buffer = new Float32Array(end);
				for (const [at, part] of parts.entries()) {
					buffer.set(
						part.map((value) => factor * value),
						starts[at]!,
					);
				}
				values.set(key + state, buffer);
			}
		};
		const stage = segment % stages;
		for (let rank = 0; rank < tensor; rank++) {
			const dense = [...(tied && last && stages > 1 ? [embedding] : []), ...ordered.filter((name) => !isExpert(name))];
			const parts = dense.map((name) => {
				const whole = readTensor(model, name) as Float32Array;
				return Float32Array.from(
					shardOf(name, model.tensors, rank, tensor)!.parts.flatMap(({ runs, count, length: run }) =>
						Array.from({ length: count }, (_, index) => {
							const at = runs.offset + index * runs.stride;
							return [...whole.subarray(at, at + run)];
						}).flat(),
					),
				);
			});
			write(0, stage * tensor + rank, parts);
		}
		for (let rank = 0; rank < experts; rank++) {
			const mine = ordered.filter(
				(name) => isExpert(name) && Math.floor(Number(/(\d+)$/.exec(name)![1]) / (4 / experts)) === rank,
			);
			write(
				1,
				stage * experts + rank,
				mine.map((name) => readTensor(model, name) as Float32Array),
			);
		}
	}
	return memoryStore(
		Object.fromEntries([...values].map(([name, all]) => [name, { shape: [all.length], values: all }])),
	);
}

const grids: readonly (readonly [string, string, Grid, boolean])[] = [
	["two stages", "ME*-ME", { segments: [3, 3], stages: 2, tensor: 1, experts: 1 }, false],
	["two stages of unequal length, tp2 ep2", "ME*-ME", { segments: [1, 5], stages: 2, tensor: 2, experts: 2 }, false],
	[
		"two stages, two segments each, one empty",
		"ME*-ME",
		{ segments: [2, 1, 0, 3], stages: 2, tensor: 1, experts: 2 },
		false,
	],
	["four stages, tied embeddings, tp2", "ME*-ME", { segments: [2, 1, 1, 2], stages: 4, tensor: 2, experts: 2 }, true],
	["one stage, tied embeddings", "ME*-ME", { segments: [6], stages: 1, tensor: 2, experts: 1 }, true],
];

for (const [name, pattern, grid, tied] of grids) {
	test(name, () => {
		const model = modelOf(pattern, tied);
		const stored = buffersOf(model, grid, tied);
		const found = optimizerBuffers(stored, [...stored.tensors.keys()], model);
		using states = new MappedStore(stored, planTensors(stored, found, "logical"));
		const trained = [...model.tensors.keys()].filter((one) => !one.endsWith(".expert_bias"));
		expect([...states.tensors.keys()].sort()).toEqual(
			["param", "exp_avg", "exp_avg_sq"]
				.flatMap((state) => trained.map((one) => `optimizer.state.${state}.${one}`))
				.sort(),
		);
		for (const one of trained) {
			const weights = readTensor(model, one) as Float32Array;
			for (const [state, factor] of [
				["param", 1],
				["exp_avg", 2],
				["exp_avg_sq", 3],
			] as const) {
				expect(readTensor(states, `optimizer.state.${state}.${one}`)).toEqual(weights.map((value) => factor * value));
			}
		}
	});
}

test("stages of another model are refused", () => {
	const stored = buffersOf(modelOf("ME*-ME", false), grids[0]![2], false);
	const other = modelOf("ME-*ME", false);
	expect(() => optimizerBuffers(stored, [...stored.tensors.keys()], other)).toThrow("is unknown");
});
