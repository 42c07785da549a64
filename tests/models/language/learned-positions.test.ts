/** A GPT model's parts: LayerNorm, and learned positions that restart with every packed sequence. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { decode } from "../../../src/decode/decode.ts";
import { greedy } from "../../../src/decode/sampling.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import { hybridParameters } from "../../../src/models/language/names.ts";
import type { Device } from "../../../src/native/device.ts";
import { groupOfOne } from "../../../src/parallel/group.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { randomValues, testDevice } from "../../support.ts";
import { smallModel } from "../small.ts";

const gpt = {
	...{ ...smallModel, "seq-length": 16, "max-position-embeddings": 20, "init-method-std": 0.3 },
	...{ normalization: "LayerNorm", "position-embedding-type": "learned_absolute" },
};
const width = smallModel["hidden-size"];

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** A model whose norms have weights and biases of their own, and its parameters by the ends of their names, in float64. */
function modelOf(pattern: string) {
	const model = new HybridModel(device, hybridConfig(configurationOf({ ...gpt, "hybrid-layer-pattern": pattern })), {
		frozen: false,
	});
	model.initialise(3);
	let seed = 1;
	for (const { name, value } of model.parameters) {
		if (!/norm/.test(name)) continue;
		const around = name.endsWith("weight") ? 1 : 0;
		device.copyToDevice(
			value,
			Float32Array.from(randomValues(value.elements, seed++), (x) => around + x / 2),
		);
	}
	const of = (end: string) => Float64Array.from(model.parameters.get(`language_model.${end}`).value.toFloat32());
	return { model, of };
}

function microbatch(ids: readonly number[], lengths: readonly number[]) {
	const tokens = ids.length;
	return { ids: Int32Array.from(ids), labels: new Int32Array(tokens), lossMask: new Float32Array(tokens), lengths };
}

/** Logits of every token, [T, padded vocabulary]. */
function logitsOf(model: HybridModel, ids: readonly number[], lengths: readonly number[]): Float32Array {
	using input = new DeviceInput(device, microbatch(ids, lengths), model.parallel);
	const forward = input.forward(0, TokenSlice.of(0, ids.length));
	using logits = model.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null);
	return logits.toFloat32();
}

/** weight_OI · x_I. */
function times(weight: Float64Array, x: Float64Array): Float64Array {
	return Float64Array.from({ length: weight.length / x.length }, (_, o) =>
		x.reduce((sum, value, i) => sum + value * weight[o * x.length + i]!, 0),
	);
}

function layerNorm(x: Float64Array, weight: Float64Array, bias: Float64Array): Float64Array {
	const mean = x.reduce((sum, value) => sum + value, 0) / x.length;
	const variance = x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length;
	return x.map((value, i) => ((value - mean) / Math.sqrt(variance + 1e-5)) * weight[i]! + bias[i]!);
}

test("packed sequences and rows of other modules against float64", () => {
	const { model, of } = modelOf("-");
	using _model = model;
	const ids = [5, 60, -1, 7, 5, 9, 30, -1];
	const lengths = [5, 3];
	const positions = [0, 1, null, 3, 4, 0, 1, null];
	const words = of("embedding.word_embeddings.weight");
	const places = of("embedding.position_embeddings.weight");
	expect(places).toHaveLength(20 * width);
	const norm = (x: Float64Array, name: string) => layerNorm(x, of(`${name}weight`), of(`${name}bias`));
	const layer = "decoder.layers.0.mlp.";
	const expected = ids.flatMap((id, t) => {
		const x = Float64Array.from({ length: width }, (_, i) =>
			positions[t] === null ? 0 : words[id * width + i]! + places[positions[t]! * width + i]!,
		);
		const u = norm(x, `${layer}linear_fc1.layer_norm_`);
		const hidden = times(of(`${layer}linear_fc1.weight`), u).map((z) => Math.max(z, 0) ** 2);
		const y = times(of(`${layer}linear_fc2.weight`), hidden).map((value, i) => value + x[i]!);
		return [...times(of("output_layer.weight"), norm(y, "decoder.final_norm."))];
	});
	const logits = logitsOf(model, ids, lengths);
	const worst = Math.max(...expected.map((value, i) => Math.abs(value - logits[i]!) / (1 + Math.abs(value))));
	expect(worst).toBeLessThan(2e-5);
});

test("decoding counts positions on from the prompts", () => {
	const { model } = modelOf("*-");
	using _model = model;
	const prompts = [
		[3, 14, 15],
		[9, 2, 6, 5, 35],
	];
	const { ids } = decode(
		model,
		{ ids: prompts, rows: null, imageTokenId: 99 },
		{ endIds: [], most: 6, sampling: greedy },
		{ group: groupOfOne("language", 0), stages: groupOfOne("pipeline", 0), edges: new Map() },
	);
	for (const [sequence, prompt] of prompts.entries()) {
		const all = [...prompt, ...ids[sequence]!];
		const logits = logitsOf(model, all, [all.length]);
		const columns = logits.length / all.length;
		const likeliest = all.map((_, t) => {
			const row = logits.subarray(t * columns, t * columns + 61);
			return row.indexOf(Math.max(...row));
		});
		expect(ids[sequence]!).toEqual(likeliest.slice(prompt.length - 1, -1));
	}
});

describe("parameters", () => {
	const names = (changes: Readonly<Record<string, unknown>>) =>
		hybridParameters(hybridConfig(configurationOf({ ...gpt, ...changes }))).map(({ name }) => name);

	test("have Megatron's names, in every kind of layer and in MTP depths", () => {
		const none = { "position-embedding-type": "none", "hybrid-layer-pattern": "ME*-/*" };
		const biases = names(none).filter((name) => /norm.*bias$/.test(name));
		const layers = "language_model.decoder.layers.";
		const depth = "language_model.mtp.layers.0.";
		expect(biases).toEqual([
			`${layers}0.mixer.in_proj.layer_norm_bias`,
			`${layers}1.pre_mlp_layernorm.bias`,
			`${layers}2.self_attention.linear_qkv.layer_norm_bias`,
			`${layers}3.mlp.linear_fc1.layer_norm_bias`,
			`${depth}mtp_model_layer.layers.0.self_attention.linear_qkv.layer_norm_bias`,
			"language_model.decoder.final_norm.bias",
			...["enorm", "hnorm", "final_layernorm"].map((name) => `${depth}${name}.bias`),
		]);
	});

	test("are those of RMSNorm without positions by default", () => {
		const plain = names({ normalization: "RMSNorm", "position-embedding-type": "none" });
		expect(plain.filter((name) => /norm.*bias$|position/.test(name))).toEqual([]);
	});
});
