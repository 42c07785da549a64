import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { writeFolderAtomically } from "../../../src/checkpoint/folders.ts";
import type { LanguageModelConfiguration } from "../../../src/checkpoint/hf/families/family.ts";
import {
	configurationFromHuggingFace,
	configurationToHuggingFace,
	detectSpelling,
	languageCorrespondence,
} from "../../../src/checkpoint/hf/families/index.ts";
import { requireCounts, spellings } from "../../../src/checkpoint/hf/families/nemotron-h-names.ts";
import { HuggingFaceFolder } from "../../../src/checkpoint/hf/folder.ts";
import { formatPythonJson, parseKeepingFloats, parsePythonJson } from "../../../src/checkpoint/hf/json.ts";
import { type HuggingFaceModel, openHuggingFaceModel } from "../../../src/checkpoint/hf/parts.ts";
import { planFolder } from "../../../src/checkpoint/hf/written-folder.ts";
import { MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { openSafetensors, type TensorEntry, writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { joinStores, readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { golden } from "../../golden.ts";

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-hf-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const tiny = golden("hybrid-tiny");
const goldens = [
	"layer-mamba",
	"layer-attention",
	"layer-mlp",
	"layer-moe",
	"hybrid-tiny",
	"hybrid-text",
	"nemotron-latent",
];

/** Copies a reference folder's model with changed tensors. */
function altered(name: string, change: (entries: TensorEntry[]) => TensorEntry[]): string {
	const target = join(folder, name);
	mkdirSync(target);
	cpSync(join(tiny, "config.json"), join(target, "config.json"));
	using file = openSafetensors(join(tiny, "model.safetensors"));
	const entries = [...file.tensors].map(([tensor, type]) => ({ name: tensor, ...type, data: () => file.read(tensor) }));
	writeSafetensors(join(target, "model.safetensors"), change(entries));
	return target;
}

/** Writes a model as it came, or with other names and smaller files under a config.json of its own. */
async function save(
	target: string,
	{ configuration, spelling, configText, weights }: HuggingFaceModel,
	{ made = false, replace = false, shardBytes = 5e9 } = {},
): Promise<void> {
	const none = { tower: null, projector: null };
	const kept = {
		...{ configText, spelling: { language: spelling, ...none } },
		leftOut: joinStores("here", []),
	};
	const companions = new Map<string, Uint8Array>();
	const model = { path: tiny, weights, language: configuration, described: {}, kept: made ? null : kept, companions };
	const planned = planFolder(model, target, { names: null, visionHeads: null, shardBytes });
	await writeFolderAtomically(target, { replace }, (path) => planned.write(path, () => {}));
}

function allTensors(store: TensorStore) {
	return Object.fromEntries([...store.tensors].map(([name, { shape }]) => [name, [shape, readTensor(store, name)]]));
}

for (const name of goldens) {
	const source = golden(name);
	test(`${name}: there and back, every byte equal`, async () => {
		const target = join(folder, name);
		using model = openHuggingFaceModel(source);
		await save(target, model);
		for (const file of ["config.json", "model.safetensors"]) {
			expect(readFileSync(join(target, file)).equals(readFileSync(join(source, file)))).toBe(true);
		}
	});
}

describe("hybrid-tiny", () => {
	test("the configuration in the program's keys", () => {
		using model = openHuggingFaceModel(tiny);
		expect(model.configuration).toMatchObject({
			hybridLayerPattern: "ME*M-E",
			numLayers: 6,
			hiddenSize: 64,
			ffnHiddenSize: 128,
			numAttentionHeads: 4,
			numQueryGroups: 2,
			kvChannels: 16,
			mambaNumHeads: 8,
			mambaChunkSize: 32,
			numExperts: 8,
			moeRouterTopk: 2,
			moeRouterTopkScalingFactor: 2.5,
			moeSharedExpertIntermediateSize: 96,
			vocabSize: 512,
			normEpsilon: 1e-5,
			untieEmbeddingsAndOutputWeights: true,
		});
		expect(model.spelling).toEqual(spellings.transformers);
	});

	test("rows of linear_qkv go group by group, experts one by one", () => {
		using model = openHuggingFaceModel(tiny);
		using file = openSafetensors(join(tiny, "model.safetensors"));
		const [h, d] = [64, 16];
		const fused = readTensor(model.weights, "language_model.decoder.layers.2.self_attention.linear_qkv.weight");
		expect(fused.length).toBe((4 + 2 * 2) * d * h);
		const part = (name: string, head: number) =>
			file.read(`model.layers.2.mixer.${name}_proj.weight`).slice(head * d * h, (head + 1) * d * h);
		const order = [part("q", 0), part("q", 1), part("k", 0), part("v", 0)];
		order.push(part("q", 2), part("q", 3), part("k", 1), part("v", 1));
		order.forEach((rows, i) => {
			expect(fused.slice(i * d * h, (i + 1) * d * h)).toEqual(rows);
		});
		const packed = file.read("model.layers.1.mixer.experts.down_proj");
		const expert = readTensor(model.weights, "language_model.decoder.layers.1.mlp.experts.linear_fc2.weight3");
		expect(expert).toEqual(packed.slice(3 * 64 * 48, 4 * 64 * 48));
	});

	test("a range of a tensor equals the same range of the whole", () => {
		using model = openHuggingFaceModel(tiny);
		for (const name of [
			"language_model.decoder.layers.2.self_attention.linear_qkv.weight",
			"language_model.decoder.layers.1.mlp.experts.linear_fc1.weight7",
		]) {
			const whole = new Uint8Array(readTensor(model.weights, name).buffer);
			for (let begin = 0; begin < whole.length; begin += 3001) {
				const range = new Uint8Array(Math.min(9007, whole.length - begin));
				model.weights.readInto(name, begin, range);
				expect(Buffer.compare(range, whole.subarray(begin, begin + range.length))).toBe(0);
			}
		}
	});

	test("published spelling in several shards, and back", async () => {
		const target = join(folder, "published");
		using model = openHuggingFaceModel(tiny);
		await save(target, model, { made: true, shardBytes: 200_000 });
		expect(readdirSync(target).filter((name) => name.endsWith(".safetensors")).length).toBeGreaterThan(3);
		using raw = HuggingFaceFolder.open(target);
		expect(raw.tensors.get("backbone.layers.1.mixer.experts.5.up_proj.weight")!.shape).toEqual([48, 64]);
		using again = openHuggingFaceModel(target);
		expect(again.spelling).toEqual(spellings.published);
		expect(again.configuration).toEqual(model.configuration);
		expect(allTensors(again.weights)).toEqual(allTensors(model.weights));
	});

	test("vocabulary padding: zero rows in, none out", () => {
		using model = openHuggingFaceModel(tiny);
		const { configuration, spelling, weights } = model;
		const padded = languageCorrespondence(configuration, spelling, "here", { paddedVocabularySize: 640 });
		const plain = languageCorrespondence(configuration, spelling, "here");
		const foreign = new MappedStore(weights, planTensors(weights, plain, "foreign"));
		const wide = new MappedStore(foreign, planTensors(foreign, padded, "logical"));
		const embedding = readTensor(wide, "language_model.embedding.word_embeddings.weight");
		expect(embedding.length).toBe(640 * 64);
		expect(embedding.slice(512 * 64).every((value) => value === 0)).toBe(true);
		const back = new MappedStore(wide, planTensors(wide, padded, "foreign"));
		expect(allTensors(back)).toEqual(allTensors(foreign));
	});

	test("an existing target is refused, and replaced when asked", async () => {
		const target = join(folder, "occupied");
		mkdirSync(target);
		writeFileSync(join(target, "mine"), "");
		using model = openHuggingFaceModel(tiny);
		await expect(save(target, model)).rejects.toThrow("the folder is not empty");
		expect(readdirSync(target)).toEqual(["mine"]);
		await save(target, model, { replace: true });
		expect(readdirSync(target).sort()).toEqual(["config.json", "model.safetensors"]);
		expect(readdirSync(folder).filter((name) => name.includes(".tmp-"))).toEqual([]);
	});

	test("every tensor of a wrong shape is named", () => {
		const path = altered("unfit", (entries) => [
			...entries.filter(({ name }) => !/layers\.2\.mixer\.q_proj|norm_f/.test(name)),
			{ name: "model.layers.0.surplus", dtype: "F32", shape: [1], data: () => Float32Array.of(1) },
			{ name: "model.layers.2.mixer.q_proj.weight", dtype: "F32", shape: [2], data: () => Float32Array.of(1, 2) },
		]);
		expect(() => openHuggingFaceModel(path)).toThrow(
			`The tensors of ${path} do not match the model; 1 missing: model.norm_f.weight; ` +
				"1 unexpected: model.layers.0.surplus; " +
				"1 of another shape: model.layers.2.mixer.q_proj.weight has [2], expected [64, 64].",
		);
	});

	test("a tied model with or without its head", () => {
		const tie = (path: string) => {
			const json = parsePythonJson(readFileSync(join(path, "config.json"), "utf8"), path);
			writeFileSync(join(path, "config.json"), formatPythonJson({ ...json, tie_word_embeddings: true }));
			return path;
		};
		const without = tie(altered("tied", (entries) => entries.filter(({ name }) => name !== "lm_head.weight")));
		using model = openHuggingFaceModel(without);
		expect(model.weights.tensors.has("language_model.output_layer.weight")).toBe(false);
		// As transformers loads a folder whose head is another matrix.
		using own = openHuggingFaceModel(tie(altered("tied-not", (entries) => entries)));
		expect(own.weights.tensors.has("language_model.output_layer.weight")).toBe(true);
		const equal = altered("tied-equal", (entries) => {
			const embedding = entries.find(({ name }) => name === "model.embeddings.weight")!;
			return entries.map((entry) => (entry.name === "lm_head.weight" ? { ...entry, data: embedding.data } : entry));
		});
		using same = openHuggingFaceModel(tie(equal));
		expect(same.weights.tensors.has("language_model.output_layer.weight")).toBe(false);
	});

	test("mixed dtypes inside one tensor are refused", () => {
		const path = altered("mixed", (entries) =>
			entries.map((entry) =>
				entry.name.includes("k_proj") ? { ...entry, dtype: "BF16", data: () => new Uint16Array(32 * 64) } : entry,
			),
		);
		expect(() => openHuggingFaceModel(path)).toThrow(
			"has parts of language_model.decoder.layers.2.self_attention.linear_qkv.weight in different dtypes (F32, BF16)",
		);
	});

	test("files with false indexes, or outside of the folder, are refused", () => {
		const index = (name: string, map: unknown) => {
			const path = join(folder, name);
			mkdirSync(path);
			cpSync(join(tiny, "config.json"), join(path, "config.json"));
			writeFileSync(join(path, "model.safetensors.index.json"), JSON.stringify({ weight_map: map }));
			return path;
		};
		expect(() => openHuggingFaceModel(index("escape", { w: "../secret" }))).toThrow("is not a plain file name");
		expect(() => openHuggingFaceModel(index("parent", { w: ".." }))).toThrow("is not a plain file name");
		expect(() => openHuggingFaceModel(index("absent", { w: "a.safetensors" }))).toThrow("it does not exist");
		expect(() => openHuggingFaceModel(index("no-map", null))).toThrow("has no weight_map");
		const linked = index("linked", { w: "a.safetensors" });
		symlinkSync(join(tiny, "model.safetensors"), join(linked, "a.safetensors"));
		expect(() => openHuggingFaceModel(linked)).toThrow("leads out of its folder");
		const wrong = index("wrong", { w: "a.safetensors" });
		cpSync(join(tiny, "model.safetensors"), join(wrong, "a.safetensors"));
		expect(() => openHuggingFaceModel(wrong)).toThrow("has no tensor w, which");
		expect(() => openHuggingFaceModel(join(folder, "nowhere"))).toThrow("it does not exist");
	});
});

describe("config.json", () => {
	const base = { model_type: "nemotron_h", hybrid_override_pattern: "ME*-", num_hidden_layers: 4 };
	const read = (json: Record<string, unknown>) => configurationFromHuggingFace(json, "config.json");

	test("both spellings of the layers, old and new names", () => {
		expect(read(base).hybridLayerPattern).toBe("ME*-");
		const types = ["mamba", "moe", "attention", "mlp"];
		expect(read({ model_type: "nemotron_h", layers_block_type: types }).hybridLayerPattern).toBe("ME*-");
		expect(() => read({ ...base, layers_block_type: ["moe"] })).toThrow("disagree");
		expect(() => read({ ...base, hybrid_override_pattern: "MX" })).toThrow('"X" at position 2');
		expect(() => read({ ...base, num_hidden_layers: 5 })).toThrow("num_hidden_layers is 5");
		expect(() => read({ model_type: "nemotron_h" })).toThrow("neither layers_block_type");
		expect(() => read({ model_type: "mixtral" })).toThrow('model_type is "mixtral"');
	});

	test("multi-token prediction: depths of one pattern, in both spellings", () => {
		const patternOf = (json: Record<string, unknown>) => read({ ...base, ...json }).hybridLayerPattern;
		expect(patternOf({ num_nextn_predict_layers: 2, mtp_hybrid_override_pattern: "*-" })).toBe("ME*-/*-/*-");
		expect(patternOf({ num_nextn_predict_layers: 1, mtp_layers_block_type: ["attention", "moe"] })).toBe("ME*-/*E");
		// transformers' default.
		expect(patternOf({ num_nextn_predict_layers: 1 })).toBe("ME*-/*E");
		expect(patternOf({ num_nextn_predict_layers: 0, mtp_hybrid_override_pattern: "*E" })).toBe("ME*-");
		expect(read({ ...base, num_nextn_predict_layers: 2 }).numLayers).toBe(4);
		const refuse = (json: Record<string, unknown>, sentence: string) =>
			expect(() => read({ ...base, num_nextn_predict_layers: 1, ...json })).toThrow(sentence);
		refuse({ num_nextn_predict_layers: 65 }, "num_nextn_predict_layers is 65, at most 64 are read");
		refuse({ num_nextn_predict_layers: -1 }, "num_nextn_predict_layers is -1, expected a whole number");
		refuse({ mtp_hybrid_override_pattern: "*G" }, 'mtp_hybrid_override_pattern has "G" at position 2');
		refuse({ mtp_hybrid_override_pattern: "" }, "mtp_hybrid_override_pattern names no layers");
		refuse({ mtp_layers_block_type: ["gru"] }, 'mtp_layers_block_type[0] is "gru", no known layer type');
		refuse(
			{ mtp_layers_block_type: ["moe"], mtp_hybrid_override_pattern: "*E" },
			"mtp_layers_block_type and mtp_hybrid_override_pattern disagree",
		);
	});

	test("settings that the model lacks are named", () => {
		expect(() => read({ ...base, mlp_hidden_act: "silu" })).toThrow('mlp_hidden_act is "silu"');
		expect(() => read({ ...base, use_bias: true })).toThrow("use_bias is true");
		expect(() => read({ ...base, time_step_limit: [0, 1] })).toThrow("time_step_limit");
		expect(() => read({ ...base, hidden_size: "wide" })).toThrow('hidden_size is "wide", expected a whole number');
		expect(() => read({ ...base, num_attention_heads: 3, num_key_value_heads: 2 })).toThrow("num_attention_heads");
		// Hugging Face divides one chosen expert's score by itself; Megatron, and so this program, does not.
		const routed = {
			...base,
			hybrid_override_pattern: "ME",
			layers_block_type: undefined,
			num_hidden_layers: undefined,
		};
		expect(() => read({ ...routed, num_experts_per_tok: 1 })).toThrow("norm_topk_prob is true");
		expect(() => read({ ...routed, norm_topk_prob: false })).toThrow("norm_topk_prob is false");
		expect(read({ ...routed, num_experts_per_tok: 1, norm_topk_prob: false }).moeRouterTopk).toBe(1);
		// Hugging Face scores a group by its two best experts, Megatron by its share of the chosen ones.
		const grouped = { ...routed, num_experts_per_tok: 4, n_group: 4, topk_group: 1 };
		expect(() => read(grouped)).toThrow("num_experts_per_tok is 4 and topk_group 1");
		for (const same of [{ topk_group: 2 }, { topk_group: 4 }, { num_experts_per_tok: 2 }]) {
			expect(read({ ...grouped, ...same }).moeRouterNumGroups).toBe(4);
		}
		expect(() => read({ ...routed, moe_latent_size: 0 })).toThrow("moe_latent_size is 0");
	});

	test("Infinity in both spellings", () => {
		for (const text of [
			'{"a": [0.0, Infinity], "s": "-Infinity"}',
			'{"a":[0,{"__float__":"Infinity"}],"s":"-Infinity"}',
		]) {
			expect(parsePythonJson(text, "x")).toEqual({ a: [0, Number.POSITIVE_INFINITY], s: "-Infinity" });
		}
		expect(formatPythonJson([Number.NEGATIVE_INFINITY])).toContain('"__float__": "-Infinity"');
		expect(() => parsePythonJson("{", "there.json")).toThrow("there.json is not JSON");
	});

	test("keys that are numbers stay where they are", () => {
		const text =
			'{\n  "z": "\\"0\\": ",\n  "id2label": {\n    "0": "a",\n    "10": "b",\n    "2": "c"\n  },\n  "1": 0.0\n}\n';
		expect(formatPythonJson(parseKeepingFloats(text, "x"))).toBe(text);
	});

	test("a written configuration reads back equal", () => {
		const configuration = read(base);
		const text = formatPythonJson(configurationToHuggingFace(configuration, "float32", "x"));
		const json = parsePythonJson(text, "x");
		expect(read(json)).toEqual(configuration);
		// Python's types count: transformers refuses a whole number in time_step_limit.
		expect(text.replace(/\s+/g, " ")).toContain('"time_step_limit": [ 0.0, { "__float__": "Infinity" } ]');
		const softmax = { ...configuration, moeRouterScoreFunction: "softmax" } as LanguageModelConfiguration;
		expect(() => configurationToHuggingFace(softmax, "float32", "x")).toThrow(
			"is another model: --moe-router-score-function is sigmoid there and softmax here",
		);
	});
});

test("every name and shape of a model is used once", () => {
	const configuration = configurationFromHuggingFace(
		{ model_type: "nemotron_h", hybrid_override_pattern: "ME*-", hidden_size: 8, vocab_size: 16 },
		"config.json",
	);
	for (const spelling of Object.values(spellings)) {
		const { logical, foreign, links } = languageCorrespondence(configuration, spelling, "here");
		for (const [side, tensors] of [
			["logical", logical],
			["foreign", foreign],
		] as const) {
			for (const [name, shape] of tensors) {
				const used = links.filter((link) => link[side] === name).reduce((n, link) => n + link.count * link.length, 0);
				expect(used).toBe(shape.reduce((a, b) => a * b, 1));
			}
		}
		expect(detectSpelling(foreign.keys())).toEqual(spelling);
	}
	expect(detectSpelling(["language_model.backbone.embeddings.weight"])).toEqual({
		base: "language_model.backbone.",
		head: "language_model.",
		experts: "separate",
	});
	expect(detectSpelling(["x_backbone.embeddings.weight"])).toBeNull();
});

test("names of MTP depths: numbered through all of them, at the top level whatever the rest begins with", () => {
	const json = { model_type: "nemotron_h", hybrid_override_pattern: "M", n_routed_experts: 2 };
	const depths = { num_nextn_predict_layers: 2, mtp_hybrid_override_pattern: "*E" };
	const configuration = configurationFromHuggingFace({ ...json, ...depths }, "config.json");
	const inside = { base: "language_model.backbone.", head: "language_model.", experts: "separate" } as const;
	const { links } = languageCorrespondence(configuration, inside, "here");
	const nameOf = (logical: string) =>
		links.find((link) => link.logical === `language_model.mtp.layers.1.${logical}`)!.foreign;
	expect(nameOf("eh_proj.weight")).toBe("mtp.layers.2.eh_proj.weight");
	expect(nameOf("final_layernorm.weight")).toBe("mtp.layers.3.final_layernorm.weight");
	expect(nameOf("mtp_model_layer.layers.0.self_attention.linear_proj.weight")).toBe("mtp.layers.2.mixer.o_proj.weight");
	expect(nameOf("mtp_model_layer.layers.1.mlp.experts.linear_fc1.weight1")).toBe(
		"mtp.layers.3.mixer.experts.1.up_proj.weight",
	);
	// Other prefixes are read, and written again.
	const prefixed = { ...inside, mtp: "language_model." };
	const { foreign } = languageCorrespondence(configuration, prefixed, "here");
	expect(foreign.has("language_model.mtp.layers.2.eh_proj.weight")).toBe(true);
	expect(detectSpelling(foreign.keys())).toEqual(prefixed);
	// A repeated depth is stored once.
	const repeated = languageCorrespondence({ ...configuration, mtpUseRepeatedLayer: true }, inside, "here");
	expect([...repeated.foreign.keys()].filter((name) => /^mtp\.layers\.[23]\./.test(name))).toEqual([]);
	expect(repeated.foreign.has("mtp.layers.1.final_layernorm.weight")).toBe(true);
});

test("experts of a config.json are compared with those of the MTP depths where the main part has none", () => {
	const packed = { ...spellings.transformers };
	const json = {
		model_type: "nemotron_h",
		hybrid_override_pattern: "M",
		n_routed_experts: 9,
		num_nextn_predict_layers: 1,
	};
	const configuration = configurationFromHuggingFace(json, "config.json");
	const names = ["a", "b", "c", "mtp.layers.1.mixer.experts.up_proj"];
	const stored = new Map(names.map((name) => [name, { shape: [4, 2, 2] }]));
	expect(() => requireCounts(configuration, packed, stored, "config.json")).toThrow(
		"n_routed_experts is 9, tensor mtp.layers.1.mixer.experts.up_proj holds 4",
	);
});
