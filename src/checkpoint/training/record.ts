/**
 * A checkpoint's record of its training beside the tensors: steps, schedules, seed, layout. JSON of the manifest's
 * `common`; the configuration is the manifest's `model`.
 */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import type { Json, Manifest } from "../native/manifest.ts";
import { fromMegatron } from "./megatron-record.ts";

const count = v.pipe(v.number(), v.integer(), v.minValue(0));

const progressSchema = v.object({
	/** Steps taken. */
	iteration: count,
	consumedSamples: count,
	/** Samples that the schedules have counted: those of steps that updated the weights. */
	scheduledSamples: count,
	/** Samples of evaluations. */
	consumedValidSamples: count,
	/** Updates of the optimizer. */
	optimizerSteps: count,
	globalBatchSize: count,
});

const recordSchema = v.object({
	training: progressSchema,
	/** Schedules by their names in `Schedules`; null: saved without the optimizer. */
	schedules: v.nullable(v.record(v.string(), v.record(v.string(), v.union([v.string(), v.number(), v.null()])))),
	/** All random numbers are drawn from the seed and their place; null: saved without. */
	rng: v.nullable(v.object({ seed: v.number() })),
	/** Policy of the encoder's gradient. */
	participation: v.string(),
	/** Types of Adam's moments and of the gradients' sums; older checkpoints, and Megatron's, do not say: fp32. */
	precision: v.optional(v.object({ expAvg: v.string(), expAvgSq: v.string(), gradientSums: v.string() }), {
		expAvg: "fp32",
		expAvgSq: "fp32",
		gradientSums: "fp32",
	}),
	/** Name of the run that began the training, kept by those that go on with it; older checkpoints have none. */
	lineage: v.optional(v.nullable(v.string()), null),
	/** Grids, for people. */
	topology: v.record(v.string(), v.unknown()),
});
export type TrainingRecord = v.InferOutput<typeof recordSchema>;

/** The manifest's object with the states of the data: a JSON list by rank. */
export const dataObject = "data.json";

/**
 * The record of a checkpoint, one of ours or one converted from Megatron's. Throws a UserError when it is not one of a
 * training.
 */
export function readRecord({ common }: Pick<Manifest, "common">, path: string): TrainingRecord {
	const { success, output, issues } = v.safeParse(recordSchema, fromMegatron(common) ?? common);
	if (success) return output;
	const key = v.getDotPath(issues[0]) ?? "";
	const what = issues[0].received === "undefined" ? `has no ${key}` : `has another ${key || "form"} than a training's`;
	throw new UserError(
		`${path} is not a checkpoint that a training can go on from: its record ${what}; --finetune takes its weights alone.`,
	);
}

/** The record as a manifest keeps it, beside the optimizer groups that Megatron wants. */
export function commonOf(record: TrainingRecord, parameterGroups: Json): Manifest["common"] {
	return { ...(record as unknown as Manifest["common"]), optimizer: { paramGroups: parameterGroups } };
}
