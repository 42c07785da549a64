/** Silent units score zero, and stronger units more. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import {
	formatImportance,
	type Importance,
	layerRanking,
	unitsOfImportance,
} from "../../../src/guests/elastic/importance/importance.ts";
import { countedTokens, ImportanceMeter } from "../../../src/guests/elastic/importance/meter.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import type { Device } from "../../../src/native/device.ts";
import { groupOfOne } from "../../../src/parallel/group.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { memoryStore } from "../../checkpoint/memory-store.ts";
import { smallModel } from "../../models/small.ts";
import { testDevice } from "../../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const c = configurationOf({
	...smallModel,
	"hybrid-layer-pattern": "ME*",
	"mamba-num-heads": 4,
	"mamba-num-groups": 2,
	"num-experts": 4,
	"init-method-std": 0.3,
});
const layer = (index: number) => `language_model.decoder.layers.${index}.`;

/** A model whose head 1 and expert 2 are silent, and whose query head 3 and channel 5 of expert 0 are ten times as strong. */
function planted(): HybridModel {
	const model = new HybridModel(device, hybridConfig(c), { frozen: true });
	model.initialise(2);
	using store = new ValueStore("planted", model);
	const tensors = Object.fromEntries(
		[...store.tensors].map(([name, { shape }]) => [
			name,
			{ shape, values: Float32Array.from(readTensor(store, name) as Float32Array) },
		]),
	);
	const rows = (name: string, begin: number, end: number, factor: number) => {
		const { shape, values } = tensors[name]!;
		const width = values.length / shape[0]!;
		for (let i = begin * width; i < end * width; i++) values[i]! *= factor;
	};
	const { headDim } = hybridConfig(c).mamba;
	rows(`${layer(0)}mixer.in_proj.weight`, headDim, 2 * headDim, 0);
	tensors[`${layer(1)}mlp.router.expert_bias`]!.values[2] = -10;
	rows(`${layer(1)}mlp.experts.linear_fc1.weight0`, 5, 6, 10);
	// Of 2 query groups of 2 heads, 8 channels each: rows of head 3's values are those of its group.
	rows(`${layer(2)}self_attention.linear_qkv.weight`, (2 + 2 + 2 + 1) * 8, (2 + 2 + 2 + 2) * 8, 10);
	loadModel(model, memoryStore(tensors));
	return model;
}

/** Scores of a model on sequences of these lengths, whose labels count in the loss where `lossMask` is 1. */
function measured(model: HybridModel, lengths: readonly number[], lossMask: Float32Array) {
	const meter = new ImportanceMeter(model.config);
	const count = lossMask.length;
	const ids = Int32Array.from({ length: count }, (_, t) => (7 * t + ((t * t) % 13)) % 61);
	const text = { ids, labels: new Int32Array(count), lossMask, lengths };
	model.probe = meter.probeOf(model, countedTokens(text));
	using input = new DeviceInput(device, text, model.parallel);
	const forward = input.forward(0, TokenSlice.of(0, count));
	model.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null)[Symbol.dispose]();
	return meter.finish(device, groupOfOne("world", 0));
}

test("tokens count up to the last one of their sequence that has a loss", () => {
	const lossMask = Float32Array.of(0, 1, 0, 1, 0, 0, /**/ 0, 0, /**/ 1, 1);
	expect([...countedTokens({ lossMask, lengths: [6, 2, 2] })]).toEqual([1, 1, 1, 1, 0, 0, 0, 0, 1, 1]);
});

test("padding and samples without a loss change no score", () => {
	using model = planted();
	const alone = measured(model, [20], new Float32Array(20).fill(1));
	const lossMask = new Float32Array(48);
	lossMask[19] = 1;
	const padded = measured(model, [30, 18], lossMask);
	const flat = ({ embedding, layers }: typeof alone) => [
		...embedding,
		...layers.flatMap(({ heads = [], experts = [], channels = [] }) => [...heads, ...experts, ...channels.flat()]),
	];
	for (const [i, score] of flat(padded).entries()) expect(score).toBeCloseTo(flat(alone)[i]!, 4);
});

test("what a meter measures is what was planted, and heads stay in their groups", () => {
	using model = planted();
	const { embedding, layers } = measured(model, [30, 18], new Float32Array(48).fill(1));

	expect(embedding.length).toBe(32);
	expect(embedding.every((score) => score > 0)).toBe(true);
	expect(layers[0]!.heads![1]).toBe(0);
	expect(layers[0]!.heads!.filter((score) => score > 0)).toHaveLength(3);
	expect(layers[1]!.experts![2]).toBe(0);
	expect(layers[1]!.channels![2]!.every((score) => score === 0)).toBe(true);
	expect(layers[1]!.channels![0]!.indexOf(Math.max(...layers[1]!.channels![0]!))).toBe(5);
	const [a, b, strong, too] = layers[2]!.heads!;
	expect(Math.min(strong!, too!)).toBeGreaterThan(3 * Math.max(a!, b!));

	const importance: Importance = {
		...{ format: "mimo-elastic-importance", version: 1, data: ["planted"], tokens: 48, pattern: "ME*", embedding },
		layers: layers.map((own, index) => ({ layer: [3, 1, 2][index]!, ...own })),
	};
	const units = unitsOfImportance(c, importance, "ranking.json");
	expect([...units.layers[0]!.mambaHeads!].slice(0, 2)).toEqual([0, 1]);
	expect([...units.layers[0]!.mambaHeads!].slice(2).toSorted()).toEqual([2, 3]);
	expect([...units.layers[2]!.queryHeads!].slice(0, 2).toSorted()).toEqual([0, 1]);
	expect(units.layers[1]!.experts!.at(-1)).toBe(2);
	expect(units.layers[1]!.channels(0)![0]).toBe(5);
	expect(layerRanking(importance)).toEqual([1, 2, 0]);
	expect(layerRanking({ ...importance, layers: importance.layers.map((own) => ({ ...own, layer: null })) })).toBeNull();
	expect(JSON.parse(formatImportance(importance))).toMatchObject({
		tokens: 48,
		layers: [{ layer: 3 }, { layer: 1 }, { layer: 2 }],
	});
});
