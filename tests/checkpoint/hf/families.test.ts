/** Families beyond NemotronH: config.json in both its forms, fields that are refused, and folders that come back byte for byte. */
import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import {
	configurationFromHuggingFace,
	configurationToHuggingFace,
	familyFor,
} from "../../../src/checkpoint/hf/families/index.ts";
import { formatPythonJson, parsePythonJson } from "../../../src/checkpoint/hf/json.ts";
import { keepFolder } from "../../../src/checkpoint/hf/kept-folder.ts";
import { openParts } from "../../../src/checkpoint/hf/parts.ts";
import { openSafetensors, writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { modelDifferences } from "../../../src/config/same-model.ts";
import { countParameters } from "../../../src/models/language/counts.ts";
import { golden } from "../../golden.ts";
import { conversionOptions } from "../conversion/options.ts";

const scratch = mkdtempSync(join(tmpdir(), "mimo-families-"));
afterAll(() => rmSync(scratch, { recursive: true }));

const names = [
	"llama",
	"llama-tied-bias",
	"mistral",
	"qwen2",
	"qwen3",
	"qwen3-moe",
	"qwen3-moe-mixed",
	"gpt-oss",
	"gemma3",
	"qwen3-next",
	"qwen3-next-delta",
	"qwen3-next-mtp",
	"qwen35-moe",
	"deepseek-v3-noq",
	"deepseek-v3-mtp",
	"glm4-moe-mtp",
] as const;
/** The family as which a model is written that two have. */
const sameModelIn: Readonly<Record<string, string>> = {
	"qwen35-moe": "qwen3_next",
};
type Json = Record<string, unknown>;
const configOf = (name: string) => JSON.parse(readFileSync(golden(`${name}/config.json`), "utf8")) as Json;
const read = (json: Json) => configurationFromHuggingFace(json, "config.json");

/** The form of transformers 4, which nearly all published folders have. */
function olderForm({ rope_parameters: positions, ...json }: Json): Json {
	const { full_attention: global, sliding_attention: local } = positions as { [kind: string]: Json | undefined };
	const { rope_theta: theta, rope_type: type, partial_rotary_factor: part, ...scaling } = global ?? (positions as Json);
	const plain = type === "default" && !("mrope_section" in scaling);
	return {
		...{ ...json, ...(local && { rope_local_base_freq: local.rope_theta }) },
		...{ rope_theta: theta, rope_scaling: plain ? null : { type, ...scaling } },
		...(part !== undefined && { partial_rotary_factor: part }),
	};
}

describe.each(names)("%s", (name) => {
	test("is the same model in the form of transformers 4 and of 5", () => {
		expect(read(olderForm(configOf(name)))).toEqual(read(configOf(name)));
	});

	test("is written as a config.json that says the same model", () => {
		const model = read(configOf(name));
		const written = configurationToHuggingFace(model, "float32", "new");
		const family = sameModelIn[name] ?? configOf(name).model_type;
		expect([familyFor(model).modelType, written.model_type]).toEqual([family, family]);
		expect(read(parsePythonJson(formatPythonJson(written), "config.json") as Json)).toEqual(model);
	});

	test("comes back byte for byte from a native checkpoint", async () => {
		const [native, back] = [join(scratch, `${name}-native`), join(scratch, `${name}-back`)];
		const source = golden(name);
		for (const [from, to, origin, target] of [
			["hf", "native", source, native],
			["native", "hf", native, back],
		] as const) {
			using plan = planConversion(conversionOptions({ from, to, source: origin, target, optimizer: false }));
			await plan.run(() => {});
		}
		expect(readdirSync(back).sort()).toEqual(["config.json", "model.safetensors"]);
		for (const file of ["config.json", "model.safetensors"]) {
			expect(readFileSync(join(back, file)).equals(readFileSync(join(source, file)))).toBeTrue();
		}
	});
});

test("a null field of experts has the family's default", () => {
	const nothing = { moe_intermediate_size: null, routed_scaling_factor: null, attention_bias: null };
	expect(read({ ...configOf("deepseek-v3-mtp"), ...nothing })).toMatchObject({
		...{ moeFfnHiddenSize: 2048, moeRouterTopkScalingFactor: 2.5 },
	});
	expect(read({ ...configOf("glm4-moe-mtp"), ...nothing, rms_norm_eps: null })).toMatchObject({
		...{ moeFfnHiddenSize: 1408, moeRouterTopkScalingFactor: 1, addQkvBias: false, normEpsilon: 1e-5 },
	});
});

test("copies of embedding and output layer in DeepSeek's prediction layers are dropped, and have to be equal", () => {
	const folder = join(scratch, "deepseek-copies");
	cpSync(golden("deepseek-v3-mtp"), folder, { recursive: true });
	const write = (change: number) => {
		using source = openSafetensors(join(golden("deepseek-v3-mtp"), "model.safetensors"));
		const entry = (name: string, data: ArrayBufferView, of = name) => ({
			...{ name, dtype: "F32" as const, shape: source.information(of).shape, data: () => data },
		});
		const [embedding, output] = ["model.embed_tokens.weight", "lm_head.weight"] as const;
		const head = (source.read(output) as Float32Array).slice();
		head[77]! += change;
		writeSafetensors(join(folder, "model.safetensors"), [
			...[...source.tensors.keys()].map((name) => entry(name, source.read(name))),
			entry("model.layers.2.embed_tokens.weight", source.read(embedding), embedding),
			entry("model.layers.2.shared_head.head.weight", head, output),
		]);
	};
	write(0);
	using parts = openParts(folder, { visionHeads: null });
	expect(parts.notices.join("\n")).toMatch(
		/embed_tokens.weight is left out: .*\n.*shared_head.head.weight is left out: /,
	);
	expect([...keepFolder(parts, { beside: false }).leftOut.tensors.keys()]).toEqual([]);
	write(1e-3);
	expect(() => openParts(folder, { visionHeads: null })).toThrow(
		"model.layers.2.shared_head.head.weight is not lm_head",
	);
});

test.each(["deepseek-v3-mtp", "qwen3-next-mtp", "glm4-moe-mtp"] as const)(
	"%s has the depths that tensors are of, whatever config.json counts",
	async (name) => {
		const isAhead = (tensor: string) =>
			(name === "glm4-moe-mtp" ? /^model\.layers\.1\./ : /^(mtp|model\.layers\.2)\./).test(tensor);
		const [field] = Object.keys(configOf(name)).filter((key) =>
			/^(mtp_num_hidden|num_nextn_predict)_layers$/.test(key),
		);
		const pattern = read(configOf(name)).hybridLayerPattern;
		const [main] = pattern.split("/");
		using whole = openParts(golden(name), { visionHeads: null });
		expect([whole.language!.configuration.hybridLayerPattern, whole.warnings]).toEqual([pattern, []]);
		const folder = (at: string, config: Json, there: (tensor: string) => boolean) => {
			const path = join(scratch, `${name}-${at}`);
			cpSync(golden(name), path, { recursive: true });
			writeFileSync(join(path, "config.json"), JSON.stringify(config));
			writeSafetensors(
				join(path, "model.safetensors"),
				[...whole.stored.tensors]
					.filter(([tensor]) => there(tensor))
					.map(([tensor, type]) => ({ name: tensor, ...type, data: () => readTensor(whole.stored, tensor) })),
				{ format: "pt" },
			);
			return path;
		};
		// As transformers writes a model that it has trained, and as Qwen3-Next is published.
		const without = folder("without", configOf(name), (tensor) => !isAhead(tensor));
		using trained = openParts(without, { visionHeads: null });
		expect(trained.language!.configuration.hybridLayerPattern).toBe(main!);
		const { [field!]: _, ...uncounted } = configOf(name);
		using published = openParts(
			folder("uncounted", uncounted, () => true),
			{ visionHeads: null },
		);
		expect(published.language!.configuration.hybridLayerPattern).toBe(pattern);

		// What transformers has trained goes back without the depths too.
		const [native, back] = ["native", "hf"].map((format) => join(scratch, `${name}-without-${format}`));
		for (const way of [
			{ from: "hf", to: "native", source: without, target: native! },
			{ from: "native", to: "hf", source: native!, target: back! },
		] as const) {
			using plan = planConversion(conversionOptions({ ...way, optimizer: false }));
			await plan.run(() => {});
		}
		for (const file of ["config.json", "model.safetensors"]) {
			expect(readFileSync(join(back!, file)).equals(readFileSync(join(without, file)))).toBeTrue();
		}

		// --mtp-num-layers 0 leaves them out, and a folder that is written has them unchanged.
		using left = openParts(golden(name), { visionHeads: null, withoutDepths: true });
		expect(left.language!.configuration.hybridLayerPattern).toBe(main!);
		expect(left.warnings.join()).toMatch(
			/ is left out .*: it predicts further tokens, which the model is trained without/,
		);
		const kept = [...keepFolder(left, { beside: false }).leftOut.tensors.keys()];
		expect(kept.sort()).toEqual([...whole.stored.tensors.keys()].filter(isAhead).sort());
	},
);

test.each([
	["llama", { model_type: "mixtral" }, /model_type is "mixtral"; "nemotron_h", .*"llama", .* can be read/],
	["llama", { hidden_act: "gelu" }, /hidden_act is "gelu", this program's model has only "silu"/],
	["llama", { mlp_bias: true }, /mlp_bias is true and attention_bias false/],
	[
		"llama",
		{ rope_parameters: { rope_type: "longrope" } },
		/rope_type is "longrope"; "default", "linear", "llama3", "yarn"/,
	],
	["llama", { num_key_value_heads: 3 }, /num_attention_heads is not a multiple of num_key_value_heads/],
	["llama", { num_hidden_layers: 1e6 }, /num_hidden_layers is 1000000, at most 2048 are read/],
	["gpt-oss", { swiglu_alpha: 1.5 }, /swiglu_alpha is 1.5, this program's model has only 1.702/],
	["gpt-oss", { attention_bias: false }, /attention_bias is false/],
	["mistral", { sliding_window: 0 }, /sliding_window is 0, expected a whole number from 1/],
	["qwen3", { layer_types: ["full_attention", "sliding_attention"] }, /layer_types\[1\] is "sliding_attention"/],
	["qwen3", { attention_bias: true }, /attention_bias is true/],
	["llama", { pad_token_id: "x" }, /pad_token_id is "x", expected a token or null/],
	["gemma3", { attn_logit_softcapping: 50 }, /attn_logit_softcapping is 50, this program's model has only null/],
	["gemma3", { final_logit_softcapping: 30 }, /final_logit_softcapping is 30, this program's model has only null/],
	["gemma3", { use_bidirectional_attention: true }, /use_bidirectional_attention is true, .* only false/],
	[
		"gemma3",
		{ hidden_activation: "silu" },
		/hidden_activation is "silu", this program's model has only "gelu_pytorch_tanh"/,
	],
	["gemma3", { num_attention_heads: 6 }, /hidden_size is 64, no multiple of num_attention_heads/],
	["gemma3", { rope_parameters: { rope_type: "default" } }, /rope_parameters has no full_attention/],
	[
		"gemma3",
		{ rope_parameters: { full_attention: {}, sliding_attention: { rope_type: "linear", factor: 2 } } },
		/rope_type of sliding_attention is "linear"; "default" can be read/,
	],
	["qwen3-next", { layer_types: ["linear_attention"] }, /layer_types names 1 layers, and the model has 3/],
	[
		"qwen3-next-delta",
		{ layer_types: ["sliding_attention"] },
		/layer_types\[0\] is "sliding_attention", and only linear/,
	],
	["qwen3-next", { linear_num_value_heads: 5 }, /linear_num_value_heads is not a multiple of linear_num_key_heads/],
	["qwen35-moe", { attn_output_gate: false }, /attn_output_gate is false, this program's model has only true/],
	[
		"deepseek-v3-mtp",
		{ scoring_func: "softmax" },
		/scoring_func is "softmax", this program's model has only "sigmoid"/,
	],
	["deepseek-v3-mtp", { topk_method: "greedy" }, /topk_method is "greedy", .* only "noaux_tc"/],
	["deepseek-v3-mtp", { moe_layer_freq: 2 }, /moe_layer_freq is 2, .* only 1/],
	["deepseek-v3-mtp", { attention_bias: true }, /attention_bias is true/],
	["deepseek-v3-mtp", { num_key_value_heads: 2 }, /num_key_value_heads is 2 and num_attention_heads 4: every head/],
	["deepseek-v3-mtp", { num_experts_per_tok: 6 }, /num_experts_per_tok is 6 and topk_group 2: transformers scores/],
	["deepseek-v3-mtp", { norm_topk_prob: false }, /norm_topk_prob is false where num_experts_per_tok is 4/],
	["deepseek-v3-mtp", { n_group: 5 }, /n_routed_experts is 12, no multiple of n_group \(5\)/],
	[
		"deepseek-v3-mtp",
		{ rope_parameters: { rope_type: "linear", factor: 2 } },
		/rope_type is "linear"; "default" and "yarn"/,
	],
	[
		"deepseek-v3-mtp",
		{ rope_parameters: { rope_type: "yarn", mscale_all_dim: 1 } },
		/mscale_all_dim is given without mscale/,
	],
])("%s with %j is refused", (name, change, sentence) => {
	expect(() => read({ ...configOf(name), ...change })).toThrow(sentence);
});

test("windows are of every layer, of layers from an index on, or of those that layer_types names", () => {
	const windows = (name: string, change: Json) => {
		const model = read({ ...configOf(name), ...change });
		const written = configurationToHuggingFace(model, "float32", "new");
		expect(read(parsePythonJson(formatPythonJson(written), "config.json") as Json)).toEqual(model);
		return [model.windowSize, model.windowAttnSkipFreq];
	};
	const on = { use_sliding_window: true, sliding_window: 8, layer_types: null };
	expect(windows("mistral", {})).toEqual([[19, 0], null]);
	expect(windows("mistral", { sliding_window: null })).toEqual([null, null]);
	expect(read({ model_type: "mistral" })).toMatchObject({ windowSize: [4095, 0], numQueryGroups: 8 });
	expect(windows("qwen2", { ...on, max_window_layers: 0 })).toEqual([[7, 0], null]);
	expect(windows("qwen2", { ...on, max_window_layers: 1 })).toEqual([
		[7, 0],
		[0, 0, 1, 1],
	]);
	expect(windows("qwen2", { ...on, use_sliding_window: false })).toEqual([null, null]);
	expect(windows("qwen3", { ...on, layer_types: ["sliding_attention", "full_attention"] })).toEqual([
		[7, 0],
		[1, 1, 0, 0],
	]);
	expect(windows("qwen3", { ...on, max_window_layers: 28 })).toEqual([null, null]);
	expect(() => windows("qwen3", { ...on, layer_types: ["full_attention"] })).toThrow("layer_types names 1 layers");
	// Five layers of six.
	const older = { layer_types: null, _sliding_window_pattern: null, sliding_window_pattern: 2 };
	expect(windows("gemma3", older)).toEqual([
		[19, 0],
		[1, 1, 0, 0, 1, 1],
	]);
	expect(windows("gemma3", { layer_types: null })).toEqual([[19, 0], null]);
});

/** The fields of the published text_configs that are not their class's defaults. */
const large = { rope_scaling: { factor: 8, rope_type: "linear" }, sliding_window: 1024 };
test.each<[string, Json]>([
	[
		"gemma-3-1b",
		{
			...{ hidden_size: 1152, intermediate_size: 6912, num_attention_heads: 4, num_key_value_heads: 1 },
			...{ max_position_embeddings: 32768, num_hidden_layers: 26, rope_local_base_freq: 10000, rope_scaling: null },
			...{ rope_theta: 1000000, sliding_window: 512, sliding_window_pattern: 6, vocab_size: 262144, head_dim: 256 },
		},
	],
	["gemma-3-4b", { ...large, hidden_size: 2560, intermediate_size: 10240, num_hidden_layers: 34 }],
	[
		"gemma-3-12b",
		{
			...{ ...large, hidden_size: 3840, intermediate_size: 15360, num_attention_heads: 16, num_hidden_layers: 48 },
			num_key_value_heads: 8,
		},
	],
	[
		"gemma-3-27b",
		{
			...{ ...large, hidden_size: 5376, intermediate_size: 21504, num_attention_heads: 32, num_hidden_layers: 62 },
			...{ num_key_value_heads: 16, head_dim: 128, query_pre_attn_scalar: 168 },
		},
	],
])("preset %s is the published model", (preset, json) => {
	const published = read({ model_type: "gemma3_text", ...json });
	const own = configurationOf({ preset, "train-iters": 1, lr: 1e-4 });
	expect(modelDifferences({ ...own }, { ...published })).toEqual([]);
	expect([own.embeddingPaddingIdx, own.maxPositionEmbeddings]).toEqual([0, published.maxPositionEmbeddings]);
});

test.each([
	["gpt-oss-20b", { num_hidden_layers: 24, num_local_experts: 32 }],
	["gpt-oss-120b", {}],
])("preset %s is the published model", (preset, sizes) => {
	// Fields of openai/gpt-oss-20b and -120b; the defaults of transformers' class are the latter's.
	const positions = { beta_fast: 32, beta_slow: 1, factor: 32, truncate: false, rope_type: "yarn" };
	const published = read({
		...{ model_type: "gpt_oss", hidden_size: 2880, head_dim: 64, num_attention_heads: 64, num_key_value_heads: 8 },
		...{
			num_hidden_layers: 36,
			num_local_experts: 128,
			experts_per_token: 4,
			intermediate_size: 2880,
			sliding_window: 128,
		},
		...{ vocab_size: 201088, rms_norm_eps: 1e-5, rope_theta: 150000, swiglu_limit: 7, max_position_embeddings: 131072 },
		...{ rope_scaling: { ...positions, original_max_position_embeddings: 4096 }, tie_word_embeddings: false, ...sizes },
	});
	const own = configurationOf({ preset, lr: 1e-5, "train-iters": 1, "global-batch-size": 1 });
	expect(modelDifferences({ ...published }, { ...own })).toEqual([]);
	expect(modelDifferences({ ...read({ model_type: "gpt_oss", ...sizes }) }, { ...own })).toEqual([]);
});

test("preset deepseek-v3 is the published model", () => {
	const positions = { type: "yarn", factor: 40, original_max_position_embeddings: 4096, beta_fast: 32, beta_slow: 1 };
	const published = read({
		...{ model_type: "deepseek_v3", num_nextn_predict_layers: 1, max_position_embeddings: 163840, rope_theta: 10000 },
		...{ rope_scaling: { ...positions, mscale: 1, mscale_all_dim: 1 }, scoring_func: "sigmoid", rms_norm_eps: 1e-6 },
	});
	const own = configurationOf({ preset: "deepseek-v3", "train-iters": 1, lr: 1e-4 });
	expect(modelDifferences({ ...own }, { ...published })).toEqual([]);
	// 671 billion parameters, and 37 billion that a token meets, without the prediction layer.
	const { total, active, embedding } = countParameters({
		...own,
		hybridLayerPattern: own.hybridLayerPattern.split("/")[0]!,
	});
	expect([Math.round(total / 1e8), Math.round((active + 2 * embedding) / 1e8)]).toEqual([6710, 376]);
});

test.each<[string, Json]>([
	["qwen3-next-80b-a3b", { ...{ model_type: "qwen3_next", intermediate_size: 5120 }, full_attention_interval: 4 }],
	["qwen3.5-35b-a3b", { model_type: "qwen3_5_moe_text" }],
])("preset %s is the published model too", (preset, json) => {
	// Both classes' defaults are the published sizes, but for these.
	const published = read({ ...json, rope_theta: 1e7, max_position_embeddings: 262144 });
	const own = configurationOf({ preset, "train-iters": 1, lr: 1e-4 });
	expect(modelDifferences({ ...own }, { ...published })).toEqual([]);
	expect([own.rotaryPercent, own.maxPositionEmbeddings]).toEqual([0.25, 262144]);
});

test("a field that is absent has its family's default", () => {
	const { head_dim: _, ...qwen3 } = configOf("qwen3");
	expect(read(qwen3).kvChannels).toBe(128);
	expect(read({ model_type: "llama" })).toMatchObject({
		hiddenSize: 4096,
		kvChannels: 128,
		rotaryBase: 10000,
		numQueryGroups: 32,
	});
	expect(read({ model_type: "llama", pad_token_id: -1 }).embeddingPaddingIdx).toBe(31999);
	expect(read({ model_type: "llama" }).embeddingPaddingIdx).toBeNull();
	// As google/gemma-3-4b-pt's text_config.
	const gemma = { hidden_size: 2560, intermediate_size: 10240, num_hidden_layers: 34, sliding_window: 1024 };
	expect(read({ model_type: "gemma3_text", ...gemma, rope_scaling: { factor: 8, rope_type: "linear" } })).toMatchObject(
		{
			...{ vocabSize: 262208, numAttentionHeads: 8, numQueryGroups: 4, kvChannels: 256, embeddingPaddingIdx: 0 },
			...{ rotaryBase: 1e6, rotaryBaseLocal: 1e4, softmaxScale: null, untieEmbeddingsAndOutputWeights: false },
			embeddingMultiplier: Math.sqrt(2560),
			windowSize: [1023, 0],
		},
	);
	expect(read({ model_type: "deepseek_v3", num_hidden_layers: 4, num_nextn_predict_layers: 1 })).toMatchObject({
		...{ hybridLayerPattern: "+-+-+-+E/+E", qLoraRank: 1536, kvLoraRank: 512, numExperts: 256, moeRouterTopk: 8 },
		...{ moeSharedExpertIntermediateSize: 2048, latentNormEpsilon: 1e-6, normEpsilon: 1e-6, rotaryInterleaved: true },
	});
	expect(read({ model_type: "qwen3_moe", num_hidden_layers: 3, mlp_only_layers: [1] })).toMatchObject({
		hybridLayerPattern: "*E*-*E",
		...{ numExperts: 128, moeRouterTopk: 8, moeRouterPreSoftmax: true, qkLayernorm: true },
	});
});
