/** LLaVA's and InternVL's folders: what is read of them, what is refused by name, and that they come back byte for byte. */
import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { describeParts, openParts } from "../../../src/checkpoint/hf/parts.ts";
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
			'model_type of the vision tower is "clip_vision_model"; "radio", "siglip_vision_model", "siglip2_vision_model", "internvl_vision" can be read.',
			"llava-siglip-qwen2",
			(json) => Object.assign(json.vision_config, { model_type: "clip_vision_model" }),
		],
		[
			"attention_bias is null, this program's vision tower has only true.",
			"internvl-qwen3",
			({ vision_config: vision }) => delete vision.attention_bias,
		],
		[
			'norm_type is "rms_norm", this program\'s vision tower has only "layer_norm".',
			"internvl-qwen3",
			(json) => Object.assign(json.vision_config, { norm_type: "rms_norm" }),
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
