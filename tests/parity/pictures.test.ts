/** Vision-language models against Hugging Face's: every probe, loss and gradient norm, and that a wrong term is noticed. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { openParts } from "../../src/checkpoint/hf/parts.ts";
import type { EncoderConfig } from "../../src/models/vision/encoder.ts";
import { visionEncoder } from "../../src/models/vit/tower.ts";
import type { Device } from "../../src/native/device.ts";
import { firstFailure, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { modelOf } from "../../src/parity/pictures/parity.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { changed } from "./changed.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const folders = ["llava-siglip-qwen2", "internvl-qwen3"];

test.each(folders)("%s", async (name) => {
	const before = device.memoryStatistics().liveBytes;
	const report = await compareAlone(device, golden(name));
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
	expect(device.memoryStatistics().liveBytes).toBe(before);
});

type Tower = EncoderConfig["tower"];
test.each<[folder: string, what: string, at: string, change: Partial<Tower>]>([
	["llava-siglip-qwen2", "tanh in its GELU", "vision.layer.0", { activation: "geluErf" }],
	["llava-siglip-qwen2", "the ε of its norms", "vision.layer.0", { normEpsilon: 1e-3 }],
	["internvl-qwen3", "the exact GELU", "vision.layer.0", { activation: "geluTanh" }],
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
