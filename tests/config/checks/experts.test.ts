/** Constraints between the keys of experts, and the description of the path of experts. */
import { describe, expect, test } from "bun:test";
import { describeExpertPath, describeProjections } from "../../../src/config/fused-mlp.ts";
import { configurationOf } from "../../../src/config/resolve.ts";

const gated = { preset: "nemotron-tiny", "squared-relu": false, swiglu: true };

describe("refused by name", () => {
	const fp8 = { bf16: true, device: "cpu", "fp8-format": "e4m3", "fp8-recipe": "blockwise", "fp8-emulate": true };
	for (const [keys, sentence] of [
		[{ "activation-func-clamp-value": 7 }, "allowed only with swiglu, quick-geglu or geglu"],
		[{ ...gated, "glu-linear-offset": 1 }, "allowed is 0 without quick-geglu"],
		[
			{ "moe-shared-expert-gate": true, "moe-shared-expert-intermediate-size": 0 },
			"allowed only with moe-shared-expert-intermediate-size",
		],
		[{ "hybrid-layer-pattern": "M*-", "moe-latent-size": 8 }, "allowed only with a mixture of experts"],
		[{ "add-bias-linear": true }, "shared experts have no biases in Megatron"],
		[
			{ "add-bias-linear": true, "disable-bias-linear": true },
			"allowed is one of add-bias-linear and disable-bias-linear",
		],
		[{ "moe-single-grouped-bias": true }, "moe-single-grouped-bias (program): the value is true; allowed only with"],
		[{ "moe-mlp-glu-interleave-size": 8 }, "allowed only with swiglu, quick-geglu or geglu, and a divisor"],
		[{ ...gated, "moe-mlp-glu-interleave-size": 7 }, "a divisor of moe-ffn-hidden-size"],
		[{ "squared-relu": false, "moe-fused-mlp": "on" }, "the activation is GELU"],
		[
			{ "moe-fused-mlp": "on", "lora-rank": 2, "lora-target-modules": ["experts.linear_fc1"] },
			"lora-target-modules names experts' projections",
		],
		[{ "moe-fused-mlp": "on", "llm-tp": 2, "llm-expt-tp": 2 }, "llm-expt-tp is 2"],
		[{ ...gated, "moe-mlp-glu-interleave-size": 8, "llm-tp": 2, "llm-expt-tp": 2 }, "allowed only with llm-expt-tp 1"],
		[{ ...fp8, "fp8-emulate": false }, "it needs device cuda (Hopper), or device cpu with fp8-emulate"],
		[{ ...fp8, device: "auto" }, "it needs device cuda (Hopper), or device cpu with fp8-emulate"],
		[{ ...fp8, device: "cuda" }, "it needs device cuda (Hopper), or device cpu with fp8-emulate"],
		[
			{ ...fp8, device: "cuda", "fp8-emulate": false, "moe-ffn-hidden-size": 24 },
			"it needs hidden-size, or moe-latent-size, and moe-ffn-hidden-size in steps of 16 on device cuda",
		],
		[{ ...fp8, bf16: false, device: "cuda", "fp8-emulate": false }, "it needs bf16, or fp8-emulate"],
		[{ ...fp8, "moe-fused-mlp": "off" }, "it needs experts as one operation, and moe-fused-mlp is off"],
		[
			{ ...fp8, "llm-tp": 2, "llm-expt-tp": 2 },
			"it needs experts as one operation, and llm-expt-tp is 2 and the sum over an expert's parts comes between",
		],
		[{ ...fp8, "fp8-recipe": null }, "it needs fp8-recipe blockwise"],
		[{ ...fp8, "fp8-format": null }, 'fp8-recipe (program): the value is "blockwise"; it needs fp8-format'],
		[{ ...fp8, "fp8-format": "hybrid" }, "hybrid is not built yet"],
		[{ ...fp8, "hybrid-layer-pattern": "M*-" }, "it needs layers of experts (E), or fp8-modules projections"],
		[{ ...fp8, "fp8-modules": ["projections"], "fp8-wgrad": true }, "it needs fp8-modules experts"],
		[{ "fp8-modules": ["projections"] }, "fp8-modules (program): the value is"],
		[{ "fp8-wgrad": true }, "fp8-wgrad (program): the value is true; it needs fp8-format"],
	] as const) {
		test(JSON.stringify(keys), () => {
			const ranks = "llm-tp" in keys ? { "llm-dp": 1 } : {};
			expect(() => configurationOf({ ...gatedOr(keys), ...ranks })).toThrow(sentence);
		});
	}
});

function gatedOr(keys: Readonly<Record<string, unknown>>): Record<string, unknown> {
	return Object.fromEntries(Object.entries({ preset: "nemotron-tiny", ...keys }).filter(([, value]) => value !== null));
}

test("the path of experts and why", () => {
	const path = (keys: Readonly<Record<string, unknown>>) =>
		describeExpertPath(configurationOf({ preset: "nemotron-tiny", ...keys }));
	expect(path({})).toBe("Experts: both products and the activation as one operation (moe-fused-mlp is auto).");
	expect(path({ "moe-fused-mlp": "off" })).toBe("Experts: one operation after the other (moe-fused-mlp is off).");
	expect(path({ "squared-relu": false })).toContain("one after the other, because the activation is GELU".slice(4));
	expect(path({ "hybrid-layer-pattern": "M-" })).toBeNull();
	const fp8 = { bf16: true, device: "cpu", "fp8-format": "e4m3", "fp8-recipe": "blockwise", "fp8-emulate": true };
	expect(path(fp8)).toContain(
		"rounded to e4m3, blockwise, which is emulated; weight gradients and master weights are not",
	);
	expect(path({ ...fp8, "fp8-modules": ["projections"] })).toEndWith("(moe-fused-mlp is auto).");
	const projections = (modules: readonly string[]) =>
		describeProjections(configurationOf({ preset: "nemotron-tiny", ...fp8, "fp8-modules": modules }));
	expect(projections(["experts"])).toBeNull();
	expect(projections(["experts", "projections"])).toBe(
		"Projections of the language model: operands of products and input gradients rounded to e4m3, blockwise, which is emulated; " +
			"weight gradients and master weights are not rounded.",
	);
	expect(path({ ...fp8, "fp8-wgrad": true })).toContain(
		"products and input and weight gradients rounded to e4m3, blockwise, which is emulated; master weights are not",
	);
});
