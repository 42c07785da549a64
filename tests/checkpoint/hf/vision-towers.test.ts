/** LLaVA's and InternVL's folders: what is read of them, what is refused by name, and that they come back byte for byte. */
import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { folderTexts, readImageProcessor } from "../../../src/checkpoint/hf/image-processor.ts";
import { readModelKeys } from "../../../src/checkpoint/hf/model-keys.ts";
import { describeParts, openParts } from "../../../src/checkpoint/hf/parts.ts";
import { keptOf, openPretrained } from "../../../src/checkpoint/hf/pretrained.ts";
import {
	moduleSpelling,
	peftCorrespondence,
	peftSpelling,
	storedSpelling,
	targetExpression,
} from "../../../src/checkpoint/lora/peft-names.ts";
import { openSafetensors, writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { golden } from "../../golden.ts";
import { conversionOptions } from "../conversion/options.ts";

const scratch = mkdtempSync(join(tmpdir(), "mimo-vision-towers-"));
afterAll(() => rmSync(scratch, { recursive: true }));

const keysOf = (folder: string) => {
	using parts = openParts(folder, { visionHeads: null });
	return { keys: describeParts(parts), notices: parts.notices, tensors: parts.weights.tensors };
};

test.each([
	["llava-siglip-qwen2", ["config.json", "model.safetensors", "preprocessor_config.json"]],
	["internvl-qwen3", ["config.json", "model.safetensors", "processor_config.json", "tokenizer.json"]],
	["qwen2-5-vl", ["config.json", "model.safetensors", "preprocessor_config.json"]],
	["glm4v-moe", ["config.json", "model.safetensors", "processor_config.json", "chat_template.jinja"]],
	["llava-onevision", ["config.json", "model.safetensors", "processor_config.json", "chat_template.jinja"]],
	["qwen3-vl-images", ["config.json", "model.safetensors", "processor_config.json"]],
	["qwen3-vl-moe", ["config.json", "model.safetensors", "processor_config.json"]],
	["qwen3-5-images", ["config.json", "model.safetensors", "processor_config.json"]],
])("%s goes through a checkpoint and back unchanged", async (name, files) => {
	const [native, back] = [join(scratch, `${name}-native`), join(scratch, `${name}-back`)];
	for (const [from, to, source, target] of [
		["hf", "native", golden(name), native],
		["native", "hf", native, back],
	] as const) {
		using plan = planConversion(conversionOptions({ from, to, source, target, optimizer: false }));
		await plan.run(() => {});
	}
	for (const file of files) {
		expect(readFileSync(join(back, file)).equals(readFileSync(join(golden(name), file)))).toBeTrue();
	}
});

test("LLaVA's tower ends at the layer that it reads", () => {
	const { keys, notices, tensors } = keysOf(golden("llava-siglip-qwen2"));
	expect(keys).toMatchObject({
		visionNumLayers: 2,
		visionFinalLayernorm: false,
		visionPatchBias: true,
		imageTokenId: 10,
	});
	expect(notices).toEqual([
		expect.stringContaining("layers.2.layer_norm1.bias and 17 more are left out: they are behind the layer"),
	]);
	expect(
		[...tensors.keys()].filter((tensor) => tensor.includes("decoder.layers.2.") && tensor.includes("radio")),
	).toEqual([]);
});

test("InternVL's class token has a position, and its projector a LayerNorm", () => {
	const { keys, tensors } = keysOf(golden("internvl-qwen3"));
	expect(keys).toMatchObject({
		...{ classTokenLen: 1, visionClassTokenPositions: true, visionLayerScale: 0.1, visionPositionMode: "bicubic" },
		...{ visionProjectionNormalization: "LayerNorm", visionProjectionActivation: "gelu", visionProjectionBias: true },
	});
	const name = [...tensors.keys()].find((tensor) => tensor.endsWith("class_position_embeddings"))!;
	expect(tensors.get(name)!.shape).toEqual([1, 32]);
});

test("Qwen3-VL's experts lie as published or as transformers writes them, which their shapes tell", () => {
	const folder = join(scratch, "odd");
	cpSync(golden("qwen3-vl-moe"), folder, { recursive: true });
	using source = openSafetensors(join(golden("qwen3-vl-moe"), "model.safetensors"));
	const isStack = (name: string) => name.includes(".mlp.experts.");
	const entries = [...source.tensors].map(([name, { dtype, shape }]) => {
		const values = source.read(name) as Float32Array;
		if (!isStack(name)) return { name, dtype, shape, data: () => values };
		const [experts, rows, columns] = shape as [number, number, number];
		const turned = Float32Array.from(values, (_, at) => {
			const [expert, within] = [Math.floor(at / (rows * columns)), at % (rows * columns)];
			return values[expert * rows * columns + (within % rows) * columns + Math.floor(within / rows)]!;
		});
		return { name, dtype, shape: [experts, columns, rows], data: () => turned };
	});
	writeSafetensors(join(folder, "model.safetensors"), entries);
	using published = openParts(golden("qwen3-vl-moe"), { visionHeads: null });
	using written = openParts(folder, { visionHeads: null });
	expect([published, written].map(({ language }) => language!.spelling.experts)).toEqual(["transposed", "packed"]);
	for (const name of published.weights.tensors.keys()) {
		expect([name, readTensor(written.weights, name)]).toEqual([name, readTensor(published.weights, name)]);
	}
});

test("a SigLIP tower and a language model of their own folders become LLaVA with a new projector", () => {
	const paths = { loadHf: golden("qwen2"), loadVision: golden("encoder-siglip"), loadProjector: null };
	using pretrained = openPretrained(paths)!;
	const { language, tower } = pretrained;
	expect(tower!.tower!.configuration).toMatchObject({ visionNumLayers: 3, visionFinalLayernorm: false });
	const kept = keptOf(pretrained, { beside: false, imageTokenId: 7, projector: null })!;
	const json = JSON.parse(kept.configText);
	expect(json).toMatchObject({
		...{ model_type: "llava", vision_feature_layer: -1, vision_feature_select_strategy: "full", image_token_index: 7 },
		...{
			text_config: { model_type: "qwen2" },
			vision_config: { model_type: "siglip_vision_model", num_hidden_layers: 3 },
		},
	});
	expect(kept.spelling).toMatchObject({
		...{ language: { base: "language_model.model.", head: "language_model." }, projector: "transformers" },
		tower: { prefix: "vision_tower.", style: "siglip" },
	});
	// The norm that LLaVA's class has and does not use goes with it.
	expect([...kept.leftOut.tensors.keys()].sort()).toEqual([
		"vision_tower.post_layernorm.bias",
		"vision_tower.post_layernorm.weight",
	]);
	expect(language!.language!.configuration.untieEmbeddingsAndOutputWeights).toBeFalse();
	using other = openPretrained({ ...paths, loadVision: golden("encoder-siglip2") })!;
	expect(keptOf(other, { beside: false, imageTokenId: 7, projector: null })).toBeNull();
});

test("SigLIP as published, a tower of text beside it, is read and written as its tower alone is", () => {
	const folder = mkdtempSync(join(scratch, "siglip-"));
	const alone = golden("encoder-siglip");
	const { architectures: _, ...vision } = JSON.parse(readFileSync(join(alone, "config.json"), "utf8"));
	const { vision_use_head: __, model_type: ___, ...published } = vision;
	const text = { model_type: "siglip_text_model", hidden_size: 32 };
	const config = { model_type: "siglip", text_config: text, vision_config: published };
	writeFileSync(join(folder, "config.json"), JSON.stringify(config));
	using source = openSafetensors(join(alone, "model.safetensors"));
	const entries = [...source.tensors].map(([name, { dtype, shape }]) => ({
		...{
			name: `vision_model.${name.replace(/^vision_model\./, "")}`,
			dtype,
			shape,
			data: () => source.read(name) as Float32Array,
		},
	}));
	const scale = { name: "logit_scale", dtype: "F32", shape: [1], data: () => Float32Array.of(2) } as const;
	writeSafetensors(join(folder, "model.safetensors"), [...entries, scale]);
	const paths = { loadHf: golden("qwen2"), loadProjector: null };
	using whole = openPretrained({ ...paths, loadVision: folder })!;
	using tower = openPretrained({ ...paths, loadVision: alone })!;
	expect(whole.tower!.tower!.configuration).toEqual(tower.tower!.tower!.configuration);
	const options = { beside: false, imageTokenId: 7, projector: null };
	const [one, two] = [whole, tower].map((parts) => keptOf(parts, options)!);
	expect(JSON.parse(one!.configText)).toMatchObject({
		vision_feature_layer: -1,
		vision_config: { vision_use_head: false },
	});
	expect([...one!.leftOut.tensors.keys()].sort()).toEqual([...two!.leftOut.tensors.keys()].sort());
});

test.each([
	[
		"llava-siglip-qwen2",
		"model.vision_tower.encoder.layers.0.self_attn.q_proj",
		"model.multi_modal_projector.linear_1",
	],
	["llava-onevision", "model.vision_tower.encoder.layers.0.self_attn.q_proj", "model.multi_modal_projector.linear_1"],
	["internvl-qwen3", "model.vision_tower.encoder.layer.0.attention.q_proj", "model.multi_modal_projector.linear_1"],
	["qwen2-5-vl", "model.visual.blocks.0.mlp.gate_proj", "model.visual.merger.mlp.0"],
	["glm4v-moe", "model.visual.blocks.0.mlp.gate_proj", "model.visual.merger.gate_proj"],
	["qwen3-vl-images", "model.visual.blocks.0.attn.qkv", "model.visual.deepstack_merger_list.1.linear_fc1"],
])("adapters of %s have the names of transformers' modules, and are told by them", (name, ofTower, ofProjector) => {
	using parts = openParts(golden(name), { visionHeads: null });
	const { language, tower, projector, configText } = parts;
	const stored = storedSpelling(language!.spelling, { tower: tower!.spelling, projector: projector!.style });
	const spelling = moduleSpelling({ stored, configText, whole: true });
	const model = {
		...language!.configuration,
		vision: { tower: tower!.configuration, projector: projector!.sizes },
	};
	const weights = [...parts.weights.tensors.keys()].filter((weight) => /linear_\w+\.weight$/.test(weight));
	const { builder, modules } = peftCorrespondence(weights, 2, model, spelling, "here");
	expect(modules).toContain(ofTower);
	expect(modules).toContain(ofProjector);
	expect(modules).toContain("model.language_model.layers.0.self_attn.o_proj");
	const ofText = modules.filter((module) => module.includes("language_model"));
	const targets = new RegExp(`^(?:${targetExpression(ofText, { fused: false })})$`);
	expect(modules.filter((module) => targets.test(module))).toEqual(ofText);
	const { base, tower: told, projector: style } = peftSpelling(builder.foreign.keys())!;
	expect([base, told, style]).toEqual([spelling.base, spelling.tower, spelling.projector]);
});

test("Qwen2.5-VL's config.json as published is the same model as that of transformers 5", () => {
	const folder = mkdtempSync(join(scratch, "published-"));
	cpSync(golden("qwen2-5-vl"), folder, { recursive: true });
	const path = join(folder, "config.json");
	const { text_config: text, vision_config: vision, ...json } = JSON.parse(readFileSync(path, "utf8"));
	const { rope_parameters: rope, model_type: _, layer_types: __, ...flat } = text;
	const { model_type: ___, rope_parameters: ____, ...tower } = vision;
	const scaling = { type: "mrope", mrope_section: rope.mrope_section };
	const published = { ...flat, ...json, vision_config: tower, rope_theta: rope.rope_theta, rope_scaling: scaling };
	writeFileSync(path, JSON.stringify(published));
	expect(keysOf(folder).keys).toEqual(keysOf(golden("qwen2-5-vl")).keys);
	expect(keysOf(folder).keys).toMatchObject({
		visionWindowSize: 16,
		fullattBlockIndexes: [1],
		mropeSection: [2, 1, 1],
	});
});

test("Qwen's processor says the limits of a picture in pixels", () => {
	const folder = golden("qwen3-vl-images");
	using parts = openParts(folder, { visionHeads: null });
	const { kind, keys } = readImageProcessor(folderTexts(parts));
	expect(kind).toBeNull();
	const values = Object.fromEntries(Object.entries(keys).map(([key, said]) => [key, said!.value]));
	expect(values).toMatchObject({
		...{ "min-pixels": 256, "max-pixels": 1536, "dynamic-resolution": true, "image-resampling": "torchvision" },
		"image-mean": [0.5, 0.5, 0.5],
	});
});

test("GLM's processor counts the pixels of both frames of a patch", () => {
	using parts = openParts(golden("glm4v-moe"), { visionHeads: null });
	const { keys } = readImageProcessor(folderTexts(parts));
	const values = Object.fromEntries(Object.entries(keys).map(([key, said]) => [key, said!.value]));
	expect(values).toMatchObject({
		...{ "min-pixels": 256, "max-pixels": 1536, "dynamic-resolution-min-side": 8, "dynamic-resolution": true },
		...{ "image-mean": [0.48145466, 0.4578275, 0.40821073], "image-resampling": "torchvision" },
	});
});

test.each([
	["qwen3-vl-images", []],
	["llava-siglip-qwen2", []],
	["internvl-qwen3", ["internvl"]],
])("around the pictures of %s its processor writes %j", (name, tags) => {
	const folder = mkdtempSync(join(scratch, "tags-"));
	cpSync(golden(name), folder, { recursive: true });
	const added = ["<img>", "</img>"].map((content, at) => ({ id: 8 + at, content }));
	writeFileSync(join(folder, "tokenizer.json"), JSON.stringify({ added_tokens: added }));
	const values = readModelKeys((key) => (key === "load-hf" ? folder : undefined));
	expect(values.filter(({ key }) => key === "image-tag-type").map(({ value }) => value)).toEqual(tags);
});

test("LLaVA-OneVision's sizes of pictures are its processor's and its model's", () => {
	using parts = openParts(golden("llava-onevision"), { visionHeads: null });
	expect(describeParts(parts)).toMatchObject({ visionImageNewline: true, visionNumLayers: 2, imageTokenId: 10 });
	const { keys } = readImageProcessor(folderTexts(parts));
	const values = Object.fromEntries(Object.entries(keys).map(([key, said]) => [key, said!.value]));
	expect(values).toMatchObject({
		...{ "img-h": 26, "img-w": 26, "max-anyres-tiles": 2, "image-resampling": "torchvision" },
		"image-grid-pinpoints": ["26x26", "26x52", "52x26", "52x52", "26x78", "78x26"],
	});
	const saying = (change: object) => {
		const texts = folderTexts({ path: parts.path, configText: JSON.stringify({ ...parts.json, ...change }) });
		return () => readImageProcessor(texts);
	};
	expect(saying({ image_grid_pinpoints: [[26, 26]] })).toThrow("differs from that of config.json");
	expect(saying({ vision_aspect_ratio: "pad" })).toThrow('vision_aspect_ratio is "pad" in config.json');
});

type Json = Record<string, unknown>;
/** What reading a folder with a changed config.json says. */
function refusalOf(name: string, change: (json: Json & { vision_config: Json }) => void): string {
	const folder = mkdtempSync(join(scratch, "changed-"));
	cpSync(golden(name), folder, { recursive: true });
	const json = JSON.parse(readFileSync(join(folder, "config.json"), "utf8"));
	change(json);
	writeFileSync(join(folder, "config.json"), JSON.stringify(json));
	try {
		keysOf(folder);
	} catch (error) {
		return (error as Error).message.replace(`${folder}/`, "");
	}
	return "";
}

describe("is refused by name", () => {
	test.each<[string, string, (json: Json & { vision_config: Json }) => void]>([
		[
			"vision_feature_layer is 7, expected one of 3 layers.",
			"llava-siglip-qwen2",
			(json) => Object.assign(json, { vision_feature_layer: 7 }),
		],
		[
			'vision_feature_select_strategy is "default", only "full" can be read: the tower has no class token to drop.',
			"llava-siglip-qwen2",
			(json) => Object.assign(json, { vision_feature_select_strategy: "default" }),
		],
		[
			'projector_hidden_act is "silu", a projector has gelu or relu2.',
			"llava-siglip-qwen2",
			(json) => Object.assign(json, { projector_hidden_act: "silu" }),
		],
		[
			'model_type of the vision tower is "clip_vision_model"; "radio", "siglip_vision_model", "siglip2_vision_model", "internvl_vision", "qwen2_5_vl", "qwen2_5_vl_vision", "qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision", "glm4v_moe", "glm4v_moe_vision", "qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision" can be read.',
			"llava-siglip-qwen2",
			(json) => Object.assign(json.vision_config, { model_type: "clip_vision_model" }),
		],
		[
			'norm_type is "group_norm", this program\'s vision tower has layer_norm or rms_norm.',
			"internvl-qwen3",
			(json) => Object.assign(json.vision_config, { norm_type: "group_norm" }),
		],
		[
			"use_mean_pooling is false, which puts a LayerNorm behind layers of rms_norm.",
			"internvl-qwen3",
			(json) => Object.assign(json.vision_config, { norm_type: "rms_norm", use_mean_pooling: false }),
		],
		[
			"vision_feature_layer is [2,1], of several only layers in ascending order can be read.",
			"llava-siglip-qwen2",
			(json) => Object.assign(json, { vision_feature_layer: [2, 1] }),
		],
		[
			"deepstack_visual_indexes is [2,0], expected layers in ascending order.",
			"qwen3-vl-images",
			(json) => Object.assign(json.vision_config, { deepstack_visual_indexes: [2, 0] }),
		],
		[
			"rms_norm_eps is 0, expected a number.",
			"glm4v-moe",
			(json) => Object.assign(json.vision_config, { rms_norm_eps: 0 }),
		],
		[
			"out_hidden_size is 0, expected a whole number from 1.",
			"glm4v-moe",
			(json) => Object.assign(json.vision_config, { out_hidden_size: 0 }),
		],
		[
			"fullatt_block_indexes is [2,1], expected layers in ascending order.",
			"qwen2-5-vl",
			(json) => Object.assign(json.vision_config, { fullatt_block_indexes: [2, 1] }),
		],
		[
			'hidden_act is "gelu", this program\'s vision tower has silu.',
			"qwen2-5-vl",
			(json) => Object.assign(json.vision_config, { hidden_act: "gelu" }),
		],
		[
			"depth is 0, expected a whole number from 1.",
			"qwen3-vl-images",
			(json) => Object.assign(json.vision_config, { depth: 0 }),
		],
		[
			"mrope_section is [3,3], expected numbers of frequencies for time, row and column.",
			"qwen3-vl-images",
			(json) =>
				Object.assign(json.text_config as Json, { rope_parameters: { rope_theta: 1e4, mrope_section: [3, 3] } }),
		],
		[
			"image_size is [24,28], no square.",
			"internvl-qwen3",
			(json) => Object.assign(json.vision_config, { image_size: [24, 28] }),
		],
		[
			"num_hidden_layers is 1000000, and there are 100 tensors.",
			"internvl-qwen3",
			(json) => Object.assign(json.vision_config, { num_hidden_layers: 1e6 }),
		],
	])("%s", (sentence, name, change) => {
		expect(refusalOf(name, change)).toEndWith(sentence);
	});
});
