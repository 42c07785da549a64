/** Keys of Energon data together, and what a rank of a layout reads. */
import { describe, expect, test } from "bun:test";
import { resolveConfiguration } from "../../../src/config/resolve.ts";
import { encodeTokens } from "../../../src/data/vision-language/encoding.ts";
import { taskOf } from "../../../src/data/vision-language/from-configuration.ts";
import { countFlopsPerToken } from "../../../src/models/language/counts.ts";
import { encoderConfig } from "../../../src/models/vision/from-configuration.ts";
import { encoderFlops, visionEncoder } from "../../../src/models/vit/tower.ts";

const base = ["--preset", "nemotron-vlm-tiny", "--data-path", "set.yaml"];
const configurationOf = (...flags: string[]) => resolveConfiguration([...base, ...flags], {}).configuration;

test("folders, URLs, JSONL and YAML files are Energon data", () => {
	const provider = (path: string) =>
		resolveConfiguration(["--preset", "nemotron-tiny", "--data-path", path], {}).configuration.datasetProvider;
	expect([import.meta.dir, "s3://bucket/set", "a.jsonl", "b.yaml"].map(provider)).toEqual(new Array(4).fill("energon"));
	expect(["a.txt", "b.safetensors"].map(provider)).toEqual(["text", "tokens"]);
});

describe("refused together", () => {
	for (const [flags, message] of [
		[["--use-tiling"], "use-tiling"],
		[["--no-dynamic-resolution", "--img-h", "40"], "img-h"],
		[["--data-end-id", "512"], "data-end-id"],
		[["--image-token-id", "200"], "lower ids are bytes"],
		[["--data-routing", "routed", "--num-workers", "0"], "num-workers"],
		[["--image-token-id", "100000"], "allowed is less than vocab-size (512)"],
		[["--image-seq-length", "7"], "allowed only without dynamic-resolution"],
		[
			["--no-dynamic-resolution", "--img-h", "64", "--img-w", "64", "--image-seq-length", "7"],
			"allowed is 16, the tokens",
		],
		[["--no-dynamic-resolution", "--img-h", "256", "--img-w", "256"], "an image takes at least 256 tokens"],
		[["--packing-max-patches", "3"], "allowed is at least 4, the patches of the smallest image"],
		[["--dynamic-resolution-min-patches", "256"], "an image takes at least 64 tokens"],
	] as const) {
		test(flags.join(" "), () => expect(() => configurationOf(...flags)).toThrow(message));
	}
});

test("image-seq-length may be what the image's geometry makes", () => {
	const sizes = ["--no-dynamic-resolution", "--img-h", "64", "--img-w", "64", "--image-seq-length", "16"];
	expect(configurationOf(...sizes).imageSeqLength).toBe(16);
});

test("the work of an image, over a sequence's, is a polynomial of its patches, with and without windows", () => {
	for (const flags of [[], ["--vision-window-size", "32", "--fullatt-block-indexes", "1", "--class-token-len", "0"]]) {
		const c = configurationOf(...flags);
		const [square, each, constant] = taskOf(c).imageWork!;
		const sequence = countFlopsPerToken(c).forwardBackward * c.seqLength;
		for (const [rows, columns] of [
			[8, 12],
			[40, 56],
			[100, 150],
		] as const) {
			const p = rows * columns;
			const flops = 3 * encoderFlops(visionEncoder(encoderConfig(c)), { rows, columns });
			expect(((square * p ** 2 + each * p + constant) * sequence) / flops).toBeCloseTo(1, 9);
		}
	}
	const text = resolveConfiguration(["--preset", "nemotron-tiny", "--data-path", "set.yaml"], {}).configuration;
	expect(taskOf(text).imageWork).toBeNull();
});

test("a text may have any id where there is no encoder, that of image-token-id too", () => {
	const fields = { tokens: Int32Array.of(510, 511, 5) };
	const sample = { key: "s", restoreKey: [], sources: [], subflavors: {}, type: "tokens", fields };
	const flags = ["--preset", "nemotron-tiny", "--data-path", "set.yaml", "--vocab-size", "512"];
	const { configuration } = resolveConfiguration(flags, {});
	expect([...encodeTokens(sample, taskOf(configuration)).labels]).toEqual([511, 5]);
	expect(() => encodeTokens(sample, taskOf(configurationOf()))).toThrow("has the token 511, the image token");
});

test("the task follows the keys", () => {
	const flags = ["--image-tag-type", "nvlm", "--conversation-template", "chatml", "--caption-prompt", "Describe it."];
	const task = taskOf(configurationOf(...flags, "--loss-roles", "user", "assistant", "--data-end-id", "10"));
	expect(task.imageTags).toEqual(["<Image>", "</Image>"]);
	expect(task.prompts.caption).toBe("Describe it.");
	expect(task.lossRoles).toEqual(["user", "assistant"]);
	expect([task.endId, task.template, task.sequenceLength]).toEqual([10, "chatml", 64]);
	expect(task.sizing).toEqual({ mode: "dynamic", minPatches: 4, maxPatches: 0, minSide: 0 });
	expect(task.tower.patchSize).toBe(8);
	const tiles = ["--no-dynamic-resolution", "--use-tiling", "--img-h", "32", "--img-w", "32", "--max-num-tiles", "4"];
	expect(taskOf(configurationOf(...tiles)).sizing).toEqual({
		mode: "tiles",
		tileSize: 32,
		minTiles: 1,
		maxTiles: 4,
		areaWeighted: false,
		thumbnail: false,
		tags: false,
	});
});
