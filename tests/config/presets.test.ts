import { expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import { countParameters } from "../../src/models/language/counts.ts";

test("presets of published models have as many parameters as transformers counts", () => {
	const published = {
		"llama-3.2-1b": 1_235_814_400,
		"llama-3.1-8b": 8_030_261_248,
		"llama-3.1-70b": 70_553_706_496,
		"mistral-7b-v0.3": 7_248_023_552,
		"qwen2.5-7b": 7_615_616_512,
		"qwen3-0.6b": 596_049_920,
		"qwen3-8b": 8_190_735_360,
		"qwen3-32b": 32_762_123_264,
		"qwen3-30b-a3b": 30_532_122_624,
		"qwen3-235b-a22b": 235_093_634_560,
		"moonlight-16b-a3b": 15_960_108_544,
	};
	const counted = Object.keys(published).map((preset) => {
		const { total } = countParameters(configurationOf({ preset, "train-iters": 1 }));
		return [preset, total] as const;
	});
	expect(Object.fromEntries(counted)).toEqual(published);
});
