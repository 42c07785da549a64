/** golden.json of a layer-* or hybrid-* folder: a language model's training run by Hugging Face transformers. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { requireBands } from "../bands.ts";
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
