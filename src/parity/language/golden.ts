/** golden.json of a layer-* or hybrid-* folder: a language model's training run by Hugging Face transformers. */

import { existsSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import { type HuggingFaceModel, parsePythonJson } from "../../checkpoint/index.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { describedConfig } from "../../models/language/from-configuration.ts";
import { UserError } from "../../system/errors.ts";
import { requireBands } from "../bands.ts";
import type { Precision } from "../comparison.ts";
import { adamW } from "../golden-fields.ts";
import { readReferenceJson } from "../reference-json.ts";

const probe = v.object({ mean: v.number(), rms: v.number(), head: v.array(v.number()) });

const languageGoldenSchema = v.object({
	dtype: v.literal("float32"),
	optimizer: v.object({
		...adamW,
		no_weight_decay: v.array(v.string()),
	}),
	/** Steps before the first routing decision that rounding flips. */
	exact_steps: v.number(),
	batch: v.number(),
	seq: v.number(),
	steps: v.array(
		v.object({
			step: v.number(),
			loss: v.number(),
			grad_norm: v.number(),
			loss_band: v.number(),
			grad_norm_band: v.number(),
		}),
	),
	step1_probe: v.object({
		layers: v.array(probe),
		logits: probe,
		grad_norm: v.record(v.string(), v.number()),
	}),
});

export type LanguageGolden = v.InferOutput<typeof languageGoldenSchema>;
export type Probe = v.InferOutput<typeof probe>;

/** Reads and checks golden.json; the error names the file and the field. */
export function readLanguageGolden(folder: string): LanguageGolden {
	const path = join(folder, "golden.json");
	if (!existsSync(path)) throw new UserError(`${folder} is no reference folder: golden.json is missing.`);
	const golden = readReferenceJson(languageGoldenSchema, path);
	requireBands(path, golden.exact_steps, golden.steps);
	return golden;
}

/**
 * Expert bias fixed, no balancing loss; group scores from the best two experts, norms with one ε, and Δ at
 * least time_step_min (whatever use_mamba_kernels says: transformers 5 ignores it).
 */
export function huggingFaceConfig(
	{ configuration, configText }: HuggingFaceModel,
	path: string,
	precision: Precision,
): HybridConfig {
	const json = parsePythonJson(configText, path);
	const timeStepMinimum = Number(json.time_step_min ?? 0.001);
	const config = describedConfig(configuration, { bf16: precision === "bf16" });
	return {
		...config,
		mamba: { ...config.mamba, gatedNormEpsilon: config.normEpsilon, timeStepMinimum },
		moe: { ...config.moe, groupScoreTopk: 2 },
	};
}
