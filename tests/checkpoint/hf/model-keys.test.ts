/** Keys of a training configuration from Hugging Face folders, and folders that are refused. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { readModelKeys } from "../../../src/checkpoint/hf/model-keys.ts";
import { openSafetensors, type TensorEntry, writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { resolveConfiguration } from "../../../src/config/resolve.ts";
import { describeOrigin } from "../../../src/config/sources.ts";
import { golden } from "../../golden.ts";
import { parts } from "../../train/restart/vision-language.ts";

const { language, tower, projector } = parts;
let folder: string;
let count = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-model-keys-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const recipe = "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 0".split(" ");

function resolve(...flags: readonly string[]) {
	return resolveConfiguration([...recipe, ...flags], {}, { folders: readModelKeys });
}

/** A copy with another config.json, or other tensors. */
function altered(
	path: string,
	{
		config = (text) => text,
		tensors,
	}: { config?: (text: string) => string; tensors?: (all: TensorEntry[]) => TensorEntry[] },
): string {
	const copy = join(folder, String(count++));
	cpSync(path, copy, { recursive: true });
	const file = join(copy, "config.json");
	writeFileSync(file, config(readFileSync(file, "utf8")));
	if (tensors) {
		using weights = openSafetensors(join(path, "model.safetensors"));
		const entries = [...weights.tensors].map(([name, type]) => ({ name, ...type, data: () => weights.read(name) }));
		writeSafetensors(join(copy, "model.safetensors"), tensors(entries));
	}
	return copy;
}

describe("keys", () => {
	test("of the padding token, whose embedding gets no gradient, unless another one is given", () => {
		const config = (text: string) => text.replace('"pad_token_id": null', '"pad_token_id": 7');
		const padded = altered(golden("llama"), { config });
		const { configuration: c, origins } = resolve("--load-hf", padded);
		expect(c.embeddingPaddingIdx).toBe(7);
		expect(describeOrigin(origins["embedding-padding-idx"])).toBe(join(padded, "config.json"));
		expect(resolve("--load-hf", padded, "--embedding-padding-idx", "3").configuration.embeddingPaddingIdx).toBe(3);
		expect(resolve("--load-hf", golden("llama")).configuration.embeddingPaddingIdx).toBeNull();
	});

	test("of a language model and a tower", () => {
		const { configuration: c, origins } = resolve("--load-hf", language, "--load-vision", tower);
		expect(c).toMatchObject({
			modelProvider: "nemotron-moe-vlm",
			hybridLayerPattern: "ME*-",
			hiddenSize: 64,
			vocabSize: 264,
			numExperts: 4,
			moeRouterTopkScalingFactor: 2.5,
			moeRouterScoreFunction: "sigmoid",
			squaredRelu: true,
			initMethodStd: 0.05,
			mambaChunkSize: 16,
			visionNumLayers: 2,
			visionHiddenSize: 32,
			visionNumAttentionHeads: 2,
			visionFfnHiddenSize: 64,
			visionMaxImgH: 64,
			visionActivation: "gelu",
			visionFinalLayernorm: false,
			classTokenLen: 4,
			patchDim: 8,
			// Nothing says them: what published models have.
			visionProjectionType: "mlp",
			visionProjectionNorm: true,
			visionProjectionFfnHiddenSize: 4 * 4 * 32,
			pixelShuffle: true,
			disableVisionClassToken: true,
			dynamicResolution: true,
			dynamicResolutionMinPatches: 4,
			dynamicResolutionMaxPatches: 16,
			imageTokenId: 5,
			tokenizer: language,
		});
		expect(describeOrigin(origins["hidden-size"])).toBe(join(language, "config.json"));
		expect(describeOrigin(origins["dynamic-resolution"])).toBe(join(tower, "preprocessor_config.json"));
	});

	test("of images that nothing is said about: the tower's own size and normalisation, unless others are given", () => {
		const silent = altered(tower, {
			config: (text) => text.replace("0.48145466", "0.5"),
			tensors: (all) => all.filter(({ name }) => !name.includes("input_conditioner")),
		});
		rmSync(join(silent, "preprocessor_config.json"));
		const images = (...flags: string[]) =>
			resolve("--load-hf", language, "--load-vision", silent, ...flags).configuration;
		const dynamic = { dynamicResolution: true, dynamicResolutionMinPatches: 4, dynamicResolutionMaxPatches: 16 };
		expect(images()).toMatchObject({ ...dynamic, imgH: 32, imgW: 32, imageMean: [0.5, 0.4578275, 0.40821073] });
		expect(images("--dynamic-resolution")).toMatchObject({ ...dynamic, dynamicResolutionMaxPatches: 0 });
		const one = { dynamicResolution: false, useTiling: false };
		expect(images("--img-h", "48", "--img-w", "48")).toMatchObject({ ...one, imgH: 48, imgW: 48 });
		expect(images("--use-tiling")).toMatchObject({ dynamicResolution: false, useTiling: true, imgH: 32, imgW: 32 });
		writeFileSync(join(silent, "preprocessor_config.json"), '{"image_processor_type": "CLIPImageProcessor"}');
		expect(images()).toMatchObject(dynamic);
		writeFileSync(join(silent, "preprocessor_config.json"), '{"max_num_patches": 2000}');
		expect(images()).toMatchObject({ dynamicResolutionMinPatches: 1024, dynamicResolutionMaxPatches: 2000 });
		const file = join(silent, "preprocessor_config.json");
		writeFileSync(file, '{"min_num_patches": -1}');
		expect(images).toThrow(
			`dynamic-resolution-min-patches (${file}): the value is -1; allowed is an integer of at least 0.`,
		);
	});

	test("of a projector's file", () => {
		const { configuration: c } = resolve("--load-hf", language, "--load-vision", tower, "--load-projector", projector);
		expect(c).toMatchObject({ visionProjectionFfnHiddenSize: 96, visionProjectionNorm: true, pixelShuffle: true });
	});

	test("of a language model alone: no keys of parts that it lacks", () => {
		const { configuration: c, origins } = resolve("--load-hf", language);
		expect(c.modelProvider).toBe("hybrid");
		expect(describeOrigin(origins["vision-hidden-size"])).toBe("default");
	});

	test("that no tensor depends on are the user's to choose", () => {
		const flags = [
			"--init-method-std",
			"0.1",
			"--image-token-id",
			"6",
			"--no-dynamic-resolution",
			"--img-h",
			"48",
			"--img-w",
			"32",
		];
		const { configuration: c } = resolve("--load-hf", language, "--load-vision", tower, ...flags);
		expect(c).toMatchObject({ initMethodStd: 0.1, imageTokenId: 6, dynamicResolution: false, imgH: 48, imgW: 32 });
		const affine = resolve(
			"--load-hf",
			language,
			"--load-vision",
			tower,
			"--vision-projection-type",
			"affine",
			"--no-vision-projection-norm",
		);
		expect(affine.configuration.visionProjectionType).toBe("affine");
	});

	test("that contradict the folders are one message with all differences", () => {
		const yaml = join(folder, "run.yaml");
		writeFileSync(yaml, "hidden-size: 128\nvision-final-layernorm: true\n");
		const flags = [
			"--load-hf",
			language,
			"--load-vision",
			tower,
			"--config",
			yaml,
			"--vocab-size",
			"512",
			"--hybrid-layer-pattern",
			"ME|*-",
		];
		expect(() => resolve(...flags)).toThrow(
			[
				"3 mistakes in the configuration:",
				`  ${yaml}:1: hidden-size is 128; ${language}/config.json says 64.`,
				`  --vocab-size: the value is 512; ${language}/config.json says 264.`,
				`  ${yaml}:2: vision-final-layernorm is true; ${tower}/config.json says false.`,
			].join("\n"),
		);
		expect(() => resolve("--load-hf", language, "--load-vision", tower, "--model-provider", "hybrid")).toThrow(
			`--model-provider: the value is "hybrid"; ${tower}/config.json says "nemotron-moe-vlm".`,
		);
		expect(() => resolve("--preset", "nemotron-tiny", "--load-hf", language)).toThrow(
			`hidden-size (preset nemotron-tiny): the value is 128; ${language}/config.json says 64.`,
		);
	});

	test("are not asked for where a flag is not a flag", () => {
		expect(() => resolve("--load-hf", language, "--no-such-thing")).toThrow(
			/^--no-such-thing: there is no such flag\.$/,
		);
	});
});

describe("folders that are refused, in one sentence", () => {
	const both =
		(lm: string, vision: string, ...more: string[]) =>
		() =>
			resolve("--load-hf", lm, "--load-vision", vision, ...more);
	const norm = "radio_model.model.blocks.1.norm2.bias";

	test("a missing tensor, one too many, one of another shape", () => {
		const without = altered(tower, { tensors: (all) => all.filter(({ name }) => name !== norm) });
		expect(both(language, without)).toThrow(`The tensors of ${without} do not match the model; 1 missing: ${norm}.`);
		const extra = altered(tower, {
			tensors: (all) => [
				...all,
				{ name: "radio_model.model.head.weight", dtype: "F32", shape: [1], data: () => new Float32Array(1) },
			],
		});
		expect(both(language, extra)).toThrow("1 unexpected: radio_model.model.head.weight.");
		const other = altered(tower, {
			tensors: (all) =>
				all.map((entry) => (entry.name === norm ? { ...entry, shape: [31], data: () => new Float32Array(31) } : entry)),
		});
		expect(both(language, other)).toThrow(`1 of another shape: ${norm} has [31], expected [32].`);
		const lm = altered(language, { tensors: (all) => all.filter(({ name }) => name !== "lm_head.weight") });
		expect(both(lm, tower)).toThrow("1 missing: lm_head.weight.");
	});

	test("a config.json without a key", () => {
		const drop = (key: string) => (text: string) => text.replace(new RegExp(`\\s*"${key}": [^,]*,`), "");
		const lm = altered(language, { config: drop("hidden_size") });
		expect(both(lm, tower)).toThrow(
			`${lm}/config.json has no hidden_size: transformers takes 4096 then, but tensor backbone.embeddings.weight has 64.`,
		);
		const vision = altered(tower, { config: drop("num_attention_heads") });
		expect(both(language, vision)).toThrow(
			"has an unknown number of heads, since config.json has no num_attention_heads",
		);
		expect(both(language, vision, "--vision-num-attention-heads", "2")().configuration.visionNumAttentionHeads).toBe(2);
		const layers = altered(language, { config: (text) => text.replace("layers_block_type", "other") });
		expect(both(layers, tower)).toThrow("neither layers_block_type nor hybrid_override_pattern names the layers.");
	});

	test("a config.json that the tensors contradict", () => {
		const wide = altered(tower, { config: (text) => text.replace('"hidden_size": 32', '"hidden_size": 64') });
		expect(both(language, wide)).toThrow(
			"config.json: hidden_size is 64, but tensor radio_model.model.patch_generator.embedder.weight says 32.",
		);
		const gated = altered(tower, {
			config: (text) => text.replace('"use_swiglu_ffn": false', '"use_swiglu_ffn": true'),
		});
		expect(both(language, gated)).toThrow("use_swiglu_ffn is true, this program's vision tower has only false.");
		const mean = altered(tower, { config: (text) => text.replace("0.48145466", "0.5") });
		expect(both(language, mean)).toThrow(/norm_mean is \[0.4814.*\], and images are normalised by \[0.5, 0.4578275, /);
	});

	test("a projector of another width than the tower or the language model", () => {
		const file = join(folder, "wide.safetensors");
		const matrix = (name: string, shape: readonly number[]): TensorEntry => ({
			name,
			...{ dtype: "F32", shape, data: () => new Float32Array(shape.reduce((product, size) => product * size, 1)) },
		});
		const write = (input: number, output: number) =>
			writeSafetensors(file, [
				matrix("mlp1.0.weight", [input]),
				matrix("mlp1.1.weight", [8, input]),
				matrix("mlp1.3.weight", [output, 8]),
			]);
		write(5120, 64);
		expect(both(language, tower, "--load-projector", file)).toThrow(
			`The projector of ${file} reads rows of 5120, but the tower of ${tower} gives rows of 32, or of 128 with --pixel-shuffle.`,
		);
		write(128, 48);
		expect(both(language, tower, "--load-projector", file)).toThrow(
			`The projector of ${file} gives rows of 48, but the language model of ${language} has width 64.`,
		);
	});

	test("a folder without the part that a flag is for", () => {
		expect(both(tower, tower)).toThrow(`${tower} (--load-hf) holds no language model.`);
		expect(both(language, language)).toThrow(`${language} (--load-vision) holds no vision tower.`);
		expect(both(language, tower, "--load-projector", tower)).toThrow(`${tower} (--load-projector) holds no projector.`);
		expect(both(language, join(folder, "nowhere"))).toThrow("nowhere: it does not exist.");
	});

	test("what Hugging Face's vision-language model has no place for", () => {
		const flags = [
			"--vision-projection-type",
			"affine",
			"--no-vision-projection-norm",
			"--save-hf",
			join(folder, "out"),
		];
		expect(both(language, tower, ...flags)).toThrow(
			"Hugging Face's vision-language model of NemotronH needs vision-projection-type mlp, vision-projection-norm.",
		);
	});
});
