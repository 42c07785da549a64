/** `mimo parity` on processes: language models alone, layouts that are refused, and what a folder that does not agree looks like. */
import { describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { golden, largeGolden } from "../../golden.ts";
import { expectAgreement } from "./agreement.ts";

const full = process.env.MIMO_TEST_FULL === "1";

describe("a language model alone agrees on processes", () => {
	const quick = {
		"hybrid-tiny": ["tp2pp2"],
		"mtp-repeated-small": ["dp3ep3"],
		qwen3: ["tp2"],
		llama: ["pp2"],
		"deepseek-v3-mtp": ["tp2", "cp2"],
		"qwen3-next-delta": ["tp2", "cp2"],
	};
	const whole = ["tp2", "pp2", "dp2", "dp2ep2", "tp2pp2"];
	const decoder = [...whole, "cp2"];
	const all = ["cp2", "pp2", "pp4", "tp2pp2", "cp2pp2", "dp2", "tp2dp2ep2", "cp2dp2ep2", "pp2dp2ep2"];
	const every = {
		...{ "hybrid-tiny": all, "hybrid-text": all },
		"mtp-repeated-small": ["tp2", "pp2", "dp3ep3", "tp2dp3ep2", "pp2dp3"],
		"mtp-means-small": ["tp2ep2", "pp3", "dp3"],
		...{
			llama: decoder,
			"llama-tied-bias": whole,
			mistral: decoder,
			qwen2: decoder,
			qwen3: decoder,
			gemma3: decoder,
		},
		...{ "qwen3-moe": whole, "qwen3-moe-mixed": whole, "nemotron-latent": whole },
		...{
			"gpt-oss": [...decoder, "tp2dp2ep2"],
			"deepseek-v3-mtp": [...decoder, "tp2dp2ep2"],
			"deepseek-v3-noq": decoder,
		},
		...{ "qwen3-next": decoder, "qwen3-next-delta": decoder, "qwen35-moe": decoder },
		...{ "qwen3-next-mtp": ["dp2", "dp2ep2"], "glm4-moe-mtp": ["dp2", "dp3ep3"] },
	};
	for (const [name, layouts] of Object.entries(full ? every : quick)) {
		for (const layout of layouts) {
			test(`${name} on ${layout}`, () => expectAgreement(golden(name), layout), 120_000);
			// A folder of one step has too few losses for bf16.
			if (!full || (/-mtp$/.test(name) && name !== "deepseek-v3-mtp")) continue;
			test(`${name} on ${layout} in bf16`, () => expectAgreement(golden(name), layout, ["--bf16"]), 120_000);
		}
	}
	for (const name of full ? ["deepseek-v3", "nemotron-head80"] : []) {
		for (const layout of name === "deepseek-v3" ? whole : ["pp2", "dp2", "dp2ep2"]) {
			test(`${name} on ${layout}`, () => {
				const folder = largeGolden(name);
				if (folder === null) return;
				for (const flags of [[], ["--bf16"]]) expectAgreement(folder, layout, flags);
			}, 120_000);
		}
	}
});

describe("refuses before a rank starts", () => {
	const cases: readonly [name: string, folder: string, flags: string[], message: RegExp][] = [
		[
			"a size that does not cut the model",
			"mimo-1x1-fixed-small",
			["--layout", "1+tp4"],
			/^mimo: Layout 1\+tp4: the language model's tp is 4; allowed .* of Mamba groups \(2\)\.\n$/,
		],
		[
			"more encoder ranks than heads",
			"mimo-1x1-fixed-small",
			["--layout", "tp16+1"],
			/^mimo: Layout tp16\+1: the encoder's tp is 16; .* of heads of the tower \(4\)\.\n$/,
		],
		[
			"lanes that samples cannot be dealt out to",
			"mimo-1x1-fixed-small",
			["--layout", "1+3"],
			/^mimo: Layout 1\+3: global-batch-size 4 cannot be dealt out to 3 data lanes of the language model\.\n$/,
		],
		[
			"another number of encoder ranks than the correction counts",
			"mimo-participation-corrected-small",
			["--layout", "1+dp2ep2"],
			/^mimo: .*mimo-participation-corrected-small scales the encoder's gradient by 2 .* this layout has 1: .*\.\n$/,
		],
		[
			"other encoder ranks with images than the correction counts",
			"mimo-participation-corrected-small",
			["--layout", "dp2|pp2"],
			/; in step 2 layout dp2\|pp2 has images on 2 of them instead of 1: its losses would differ\.\n$/,
		],
		[
			"an encoder that the reference does not have",
			"hybrid-tiny",
			["--layout", "1+pp2"],
			/^mimo: Layout 1\+pp2: the model has no encoder; a layout is one side, such as tp2pp2\.\n$/,
		],
		[
			"heads that cannot be cut",
			"hybrid-tiny",
			["--layout", "tp4"],
			/^mimo: Layout tp4: .* is a divisor of query groups \(2\) and of Mamba groups \(2\)\.\n$/,
		],
		[
			"heads that cannot be dealt out",
			"mimo-1x1-fixed-small",
			["--layout", "1+tp2cp3"],
			/^mimo: Layout 1\+tp2cp3: cp is 3; allowed .* deals out the attention heads of a tensor-parallel rank evenly \(\d+ in \d+ groups\)\.\n$/,
		],
	];
	for (const [name, reference, flags, message] of cases) {
		test(name, () => {
			const folder = golden(reference);
			const { exitCode, stdout, stderr } = mimo(["parity", "--golden", folder, ...flags]);
			expect(stderr).toMatch(message);
			expect([exitCode > 0, stdout]).toEqual([true, ""]);
		});
	}
});

test("a folder that does not agree ends with 1, its first difference, and not a word of failed ranks", () => {
	const folder = golden("mimo-1x1-fixed-small");
	const scratch = mkdtempSync(join(tmpdir(), "mimo-wrong-"));
	try {
		const wrong = join(scratch, "wrong");
		cpSync(folder, wrong, { recursive: true });
		const config = JSON.parse(readFileSync(join(folder, "config.json"), "utf8"));
		config.optimizer.weight_decay *= 1.5;
		const changed = join(wrong, "config.json");
		rmSync(changed, { force: true });
		writeFileSync(changed, JSON.stringify(config));
		const { exitCode, stdout, stderr } = mimo(["parity", "--golden", wrong, ...deviceFlags.split(" ")]);
		expect(stdout).toMatch(/\/wrong: FAILED, first at step [2-9] .*, off by \S+ \(limit \S+\)\.\n$/);
		expect([exitCode, stderr]).toEqual([1, ""]);
	} finally {
		rmSync(scratch, { recursive: true });
	}
}, 120_000);
