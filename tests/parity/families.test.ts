/** Language models of other families against Hugging Face's: every probe, loss and gradient norm of 30 steps. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { HybridConfig } from "../../src/models/language/config.ts";
import type { Device } from "../../src/native/device.ts";
import { firstFailure, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { changed } from "./changed.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

test.each([
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
])("%s", async (name) => {
	const before = device.memoryStatistics().liveBytes;
	const report = await compareAlone(device, golden(name));
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
	expect(device.memoryStatistics().liveBytes).toBe(before);
});

test("qwen3-moe-mixed, whose one layer of experts has the balancing loss that Megatron has", async () => {
	// transformers' loss is Megatron's times the experts of a token.
	const report = await compareAlone(device, golden("qwen3-moe-mixed"), {
		configure: changed("language", ({ moe, ...model }) => ({
			...model,
			moe: { ...moe, balancing: [{ type: "aux_loss", coefficient: moe.topk * moe.balancing[0]!.coefficient }] },
		})),
	});
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
});

type Change = (config: HybridConfig) => Partial<HybridConfig>;
const ofAttention =
	(change: (attention: HybridConfig["attention"]) => Partial<HybridConfig["attention"]>): Change =>
	({ attention }) => ({ attention: { ...attention, ...change(attention) } });
test.each<[string, string, Change]>([
	["llama", "the scaling of rotary frequencies", ofAttention(({ rope }) => ({ rope: { ...rope!, scaling: null } }))],
	["mistral", "its window", ofAttention(() => ({ window: null }))],
	["mistral", "the query's own place in the window", ofAttention(() => ({ window: 21 }))],
	["gpt-oss", "YaRN's factor of cosines", ofAttention(({ rope }) => ({ rope: { ...rope!, amplitude: 1 } }))],
	["gemma3", "another base of rotary embeddings in windows", ofAttention(() => ({ localRopeBase: null }))],
	["gemma3", "the gradient of a token's embedding", ({ embedding }) => ({ embedding: { ...embedding, paddingId: 7 } })],
	["qwen3-next", "the features that do not turn", ofAttention(({ rope }) => ({ rope: { ...rope!, percent: 1 } }))],
	["qwen3", "its own head size in the scale of scores", ofAttention(() => ({ softmaxScale: 1 / Math.sqrt(16) }))],
])("%s without %s is noticed", async (name, _, change) => {
	const report = await compareAlone(device, golden(name), {
		configure: changed("language", (config) => ({ ...config, ...change(config) })),
	});
	expect(firstFailure(report)).not.toBeNull();
});

type ChangeLatents = (latent: NonNullable<HybridConfig["latent"]>) => Partial<NonNullable<HybridConfig["latent"]>>;
test.each<[string, ChangeLatents]>([
	["the ε of its latents' norms", () => ({ normEpsilon: 1e-4 })],
	[
		"YaRN's factor of the scores",
		({ contentDim, positionDim }) => ({ softmaxScale: (contentDim + positionDim) ** -0.5 }),
	],
	["neighbouring columns as pairs", ({ rope }) => ({ rope: { ...rope, interleaved: false } })],
	["the scaling of rotary frequencies", ({ rope }) => ({ rope: { ...rope, scaling: null } })],
])("deepseek-v3-mtp without %s is noticed", async (_, change) => {
	const report = await compareAlone(device, golden("deepseek-v3-mtp"), {
		configure: changed("language", (config) => ({
			...config,
			latent: { ...config.latent!, ...change(config.latent!) },
		})),
	});
	expect(firstFailure(report)).not.toBeNull();
});
