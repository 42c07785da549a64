/** Scaled frequencies are those of transformers 5.23 (ROPE_INIT_FUNCTIONS), which computes them in fp32. */
import { expect, test } from "bun:test";
import { configurationFromHuggingFace, configurationToHuggingFace } from "../../../src/checkpoint/hf/families/index.ts";
import { formatPythonJson, parsePythonJson } from "../../../src/checkpoint/hf/json.ts";
import { describedConfig } from "../../../src/models/language/from-configuration.ts";
import { ropeFrequencies } from "../../../src/models/language/rope-frequencies.ts";

const yarn = { rope_type: "yarn", rope_theta: 10000, factor: 40, original_max_position_embeddings: 4096 };

test.each<[string, number, Record<string, unknown>, Record<number, number>, number]>([
	[
		"gpt-oss: corners between indices",
		64,
		{ ...yarn, rope_theta: 150000, factor: 32, beta_fast: 32, beta_slow: 1, truncate: false },
		{ 0: 1, 8: 0.050813273, 12: 0.0067949593, 16: 0.00045648392, 20: 1.8188337e-5, 24: 4.0999785e-6, 31: 3.0235114e-7 },
		1.3465735902799727,
	],
	[
		"DeepSeek-V3: equal mscales",
		64,
		{ ...yarn, mscale: 1, mscale_all_dim: 1 },
		{ 8: 0.1, 12: 0.026879361, 16: 0.0055, 20: 0.00079056941, 24: 2.5e-5, 31: 3.3338035e-6 },
		1,
	],
	["other mscales", 64, { ...yarn, mscale: 0.8, mscale_all_dim: 0.5 }, { 16: 0.0055 }, 1.0934331941177564],
	["one mscale alone, which is not taken", 64, { ...yarn, mscale: 0.8 }, { 16: 0.0055 }, 1.3688879454113936],
	[
		"a factor of cosines of its own, half of the head",
		32,
		{
			...{ ...yarn, rope_theta: 500, factor: 4, beta_fast: 16, beta_slow: 2, attention_factor: 0.9 },
			...{ original_max_position_embeddings: 64, partial_rotary_factor: 0.5 },
		},
		{ 2: 0.10573712, 3: 0.024312312, 4: 0.01118034, 7: 0.0010872796 },
		0.9,
	],
	[
		"no factor",
		32,
		{ ...yarn, factor: null, original_max_position_embeddings: 1024 },
		{ 4: 0.075, 6: 0.015811387, 8: 0.0025, 10: 0.00039528473, 12: 0.000125, 15: 2.2228493e-5 },
		1.2079441541679836,
	],
	[
		"corners below the first index",
		8,
		{ ...yarn, factor: 8, beta_slow: 30, original_max_position_embeddings: 16 },
		{ 0: 1, 1: 0.1, 2: 0.01, 3: 0.001 },
		1.2079441541679836,
	],
	[
		"linear",
		32,
		{ rope_type: "linear", rope_theta: 1e6, factor: 8 },
		{ 0: 0.125, 4: 0.0039528473, 8: 0.000125, 15: 2.9642172e-7 },
		1,
	],
])("%s", (_, headDim, positions, expected, amplitude) => {
	const json = { model_type: "llama", num_attention_heads: 1, head_dim: headDim, max_position_embeddings: 8192 };
	const model = configurationFromHuggingFace({ ...json, rope_parameters: positions }, "config.json");
	const rope = describedConfig(model, { bf16: false }).attention.rope!;
	const frequencies = ropeFrequencies(rope, headDim);
	for (const [index, frequency] of Object.entries(expected)) {
		expect(Math.abs(frequencies[Number(index)]! / frequency - 1)).toBeLessThan(1e-6);
	}
	expect(rope.amplitude).toBeCloseTo(amplitude, 12);
	const written = configurationToHuggingFace(model, "float32", "new");
	const again = parsePythonJson(formatPythonJson(written), "new") as Record<string, unknown>;
	expect(configurationFromHuggingFace(again, "new")).toEqual(model);
});
