/** Vision-language models, and vision towers alone, against Hugging Face's: every probe, loss and gradient norm, and that a wrong term is noticed. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { openParts } from "../../src/checkpoint/hf/parts.ts";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import type { HybridConfig } from "../../src/models/language/config.ts";
import type { EncoderConfig } from "../../src/models/vision/encoder.ts";
import { visionEncoder } from "../../src/models/vit/tower.ts";
import type { Device } from "../../src/native/device.ts";
import { firstFailure, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone, layoutOf } from "../../src/parity/formats.ts";
import { readPictureBatches } from "../../src/parity/pictures/batches.ts";
import { modelOf } from "../../src/parity/pictures/parity.ts";
import { Scratch } from "../data/fixtures.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { changed } from "./changed.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const folders = [
	...["encoder-siglip", "encoder-siglip2"],
	...["qwen2-5-vl", "llava-onevision", "glm4v-moe"],
	...["llava-siglip-qwen2", "internvl-qwen3", "qwen3-vl-images", "qwen3-vl-moe", "qwen3-5-images"],
];

test.each(folders)("%s", async (name) => {
	const before = device.memoryStatistics().liveBytes;
	const report = await compareAlone(device, golden(name));
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
	expect(device.memoryStatistics().liveBytes).toBe(before);
});

test("encoder-siglip with the exact GELU is noticed at the first layer, and it runs on no other layout", async () => {
	using scratch = new Scratch();
	const folder = join(scratch.path, "reference");
	cpSync(golden("encoder-siglip"), folder, { recursive: true });
	const config = join(folder, "config.json");
	const text = readFileSync(config, "utf8");
	writeFileSync(config, text.replace("gelu_pytorch_tanh", "gelu"));
	const report = await compareAlone(device, folder, { steps: 1 });
	expect(firstFailure(report)?.name).toBe("step 1 vision.layer.0");
	const asked = { layout: null, weights: null, bf16: false };
	expect(layoutOf(folder, asked)).toBeNull();
	expect(() => layoutOf(folder, { ...asked, layout: "tp2" })).toThrow("--layout: ");
});

type Tower = EncoderConfig["tower"];
const aligned: Partial<Tower> = { positions: { mode: "direct", aspectRatioSelect: false, randomCrop: false } };
test.each<[folder: string, what: string, at: string, change: Partial<Tower>]>([
	["llava-siglip-qwen2", "tanh in its GELU", "vision.layer.0", { activation: "geluErf" }],
	["llava-siglip-qwen2", "the ε of its norms", "vision.layer.0", { normEpsilon: 1e-3 }],
	["internvl-qwen3", "the exact GELU", "vision.layer.0", { activation: "geluTanh" }],
	["qwen2-5-vl", "its windows", "vision.layer.0", { windows: { side: 4, full: [0, 1] } }],
	["qwen2-5-vl", "the layer that attends over images", "vision.layer.1", { windows: { side: 4, full: [] } }],
	["glm4v-moe", "the bicubic filter", "vision.layer.0.input", aligned],
	["glm4v-moe", "the ε of its norms", "vision.layer.0.input", { normEpsilon: 1e-3 }],
	["qwen3-vl-images", "its table's corners at the picture's", "vision.layer.0.input", aligned],
	["qwen3-vl-images", "rotary embeddings of patches", "vision.layer.0", { rotaryBase: null }],
	["qwen3-vl-images", "the layers that DeepStack reads", "vision.deepstack.0", { taps: [1, 2] }],
])("%s without %s is noticed at %s", async (name, _, at, change) => {
	using parts = openParts(golden(name), { visionHeads: null });
	const { encoder } = modelOf(parts, "f32");
	const wrong = visionEncoder({ ...encoder, tower: { ...encoder.tower, ...change } });
	const report = await compareAlone(device, golden(name), {
		steps: 1,
		configure: changed("encoders", ([one]) => [{ ...one!, parts: wrong }]),
	});
	expect(firstFailure(report)?.name).toBe(`step 1 ${at}`);
});

test("in bf16", async () => {
	const report = await compareAlone(device, golden("internvl-qwen3"), { precision: "bf16" });
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
});

type Attention = HybridConfig["attention"];
test.each<[string, Partial<Attention>]>([
	["axes that take turns", { mropeInterleaved: false }],
	["the number of frequencies by row", { mropeSection: [4, 2, 2] }],
])("qwen3-vl-images without %s is noticed behind the first layer", async (_, change) => {
	const report = await compareAlone(device, golden("qwen3-vl-images"), {
		steps: 1,
		configure: changed("language", ({ attention, ...config }) => ({
			...config,
			attention: { ...attention, ...change },
		})),
	});
	expect(firstFailure(report)?.name).toBe("step 1 layer 1");
});

test.each(["qwen3-vl-images", "qwen3-vl-moe", "qwen3-5-images"])("%s: positions of time, row and column", (name) => {
	using parts = openParts(golden(name), { visionHeads: null });
	const { language, encoder } = modelOf(parts, "f32");
	using file = openSafetensors(join(golden(name), "batches.safetensors"));
	const steps = [...file.tensors.keys()].filter((tensor) => tensor.endsWith(".position_ids")).length;
	expect(language.attention.mropeSection).not.toBeNull();
	const { tower } = visionEncoder(encoder);
	const [batch, seq] = file.information("1.input_ids").shape as [number, number];
	const sizes = {
		steps,
		batch,
		seq,
		placeholder: parts.imageTokenId!,
		tower,
		config: encoder.tower,
		mrope: true,
		sizing: null,
	};
	for (const [step, samples] of readPictureBatches(golden(name), sizes).entries()) {
		// [axis, sample, token]; of text alone a token's place.
		const wanted = file.read(`${step + 1}.position_ids`) as Int32Array;
		for (const [sample, { text }] of samples.entries()) {
			const places = Int32Array.from({ length: 3 * seq }, (_, at) => at % seq);
			const own = [0, 1, 2].flatMap((axis) => [
				...wanted.subarray((axis * batch + sample) * seq, (axis * batch + sample + 1) * seq),
			]);
			expect([...(text.positions ?? places)]).toEqual(own);
		}
	}
});
