/** `mimo parity` on processes: vision-language models that transformers trained. */
import { describe, expect, test } from "bun:test";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { golden } from "../../golden.ts";
import { expectAgreement } from "./agreement.ts";

const full = process.env.MIMO_TEST_FULL === "1";

describe.each([
	["llava-siglip-qwen2", ["1|1", "dp3|dp3", "1+pp3"], ["tp2+tp2"]],
	["llava-onevision", ["1|1", "tp2|tp2", "1+pp2"], ["dp2+1"]],
	["internvl-qwen3", ["1+1", "tp2|tp2", "dp3+1"], ["tp2+pp3"]],
	["qwen3-vl-moe", ["1+1", "tp2|tp2", "dp3|dp3", "tp2+tp2"], ["tp2+pp2", "pp2+1"]],
	["glm4v-moe", ["1+1", "dp3|dp3", "tp2|tp2"], ["tp2+pp2"]],
	["qwen3-5-images", ["1+1", "tp2|tp2", "1+pp2"], []],
] as const)("%s agrees on processes", (name, more, quick) => {
	for (const layout of full ? [...quick, ...more] : quick) {
		test(layout, () => expectAgreement(golden(name), layout), 120_000);
	}
});

test("a first pipeline stage without the layers that DeepStack's rows are added to is refused", () => {
	const { exitCode, stderr } = mimo(
		`parity --golden ${golden("qwen3-vl-images")} --layout 1+pp4 ${deviceFlags}`.split(" "),
	);
	const why = "rows of 2 layers are added behind the first MLPs or experts, of which the first pipeline stage has 1";
	expect([exitCode, stderr]).toEqual([2, `mimo: Layout 1+pp4: ${why}.\n`]);
});
