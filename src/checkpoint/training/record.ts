/**
 * A checkpoint's record of its training beside the tensors: steps, schedules, seed, layout. JSON of the manifest's
 * `common`; the configuration is the manifest's `model`.
 */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import type { Json, Manifest } from "../native/manifest.ts";

const count = v.pipe(v.number(), v.integer(), v.minValue(0));

const progressSchema = v.object({
	/** Steps taken. */
	iteration: count,
	consumedSamples: count,
	/** Samples that the schedules have counted: those of steps that updated the weights. */
	scheduledSamples: count,
	/** Samples of evaluations. */
	consumedValidSamples: count,
	/** Values that guests keep, by names of theirs; older checkpoints, and Megatron's, keep none. */
	kept: v.optional(v.record(v.string(), v.array(v.number()))),
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
	/** --optimizer; older checkpoints, and Megatron's, do not say: adam. */
	updates: v.optional(v.string(), "adam"),
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

// The record of a training in Megatron's words (docs/spec/checkpoint.md §1.7, docs/spec/runtime.md §5) and ours.
// Megatron keeps the counters of samples among its arguments, and the optimizer's steps in every group of parameters.

type JsonObject = Manifest["common"];

function objectOf(value: Json | undefined): JsonObject {
	return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as JsonObject) : {};
}

/** Our names of the fields of opt_param_scheduler, whose steps are samples. */
const learningRateNames = {
	style: "lr_decay_style",
	maximum: "max_lr",
	minimum: "min_lr",
	warmupSamples: "lr_warmup_steps",
	decaySamples: "lr_decay_steps",
} as const;
const weightDecayNames = {
	style: "wd_incr_style",
	start: "start_wd",
	end: "end_wd",
	rampSamples: "wd_incr_steps",
} as const;

function translate(names: Readonly<Record<string, string>>, from: JsonObject): JsonObject {
	return Object.fromEntries(Object.entries(names).map(([ours, theirs]) => [ours, from[theirs] ?? null]));
}

/** A checkpoint's description of its model. Megatron's arguments may hold only the padded vocabulary. */
export function describedModel({ model, common }: Pick<Manifest, "model" | "common">): JsonObject {
	if (common.megatron === undefined) return model;
	const args = objectOf(objectOf(common.megatron).args);
	const { vocabSize: _, ...rest } = model;
	return typeof args.vocab_size === "number" ? model : rest;
}

/**
 * The training's record in a converted checkpoint of Megatron, in this program's fields; null: it was not converted.
 */
function fromMegatron(common: JsonObject): JsonObject | null {
	if (common.training !== undefined || common.megatron === undefined) return null;
	const megatron = objectOf(common.megatron);
	const args = objectOf(megatron.args);
	const scheduler = objectOf(megatron.opt_param_scheduler);
	const groups = Object.values(objectOf(objectOf(common.optimizer).paramGroups))
		.flat(2)
		.map((group) => objectOf(group));
	const scheduled = scheduler.num_steps ?? 0;
	return {
		training: {
			iteration: megatron.iteration ?? null,
			consumedSamples: args.consumed_train_samples ?? null,
			scheduledSamples: scheduled,
			consumedValidSamples: args.consumed_valid_samples ?? 0,
			optimizerSteps: groups[0]?.step ?? 0,
			globalBatchSize: args.global_batch_size ?? null,
		},
		schedules:
			megatron.opt_param_scheduler === undefined
				? null
				: {
						// WSD's anneal and the start of the warm-up are not kept: those of the run count.
						learningRate: translate(learningRateNames, scheduler),
						weightDecay: translate(weightDecayNames, scheduler),
					},
		rng: typeof args.seed === "number" ? { seed: args.seed } : null,
		participation: "exact",
		topology: {},
	};
}

/** opt_param_scheduler and the counters among the arguments that Megatron resumes with; {} without a record. */
export function toMegatron(common: JsonObject): { readonly state: JsonObject; readonly args: JsonObject } {
	if (common.training === undefined) return { state: {}, args: {} };
	const training = objectOf(common.training);
	const schedules = objectOf(common.schedules);
	const back = (names: Readonly<Record<string, string>>, from: JsonObject) =>
		Object.entries(names).map(([ours, theirs]) => [theirs, from[ours] ?? null] as const);
	const scheduler = Object.fromEntries([
		...back(learningRateNames, objectOf(schedules.learningRate)),
		...back(weightDecayNames, objectOf(schedules.weightDecay)),
		["num_steps", training.scheduledSamples ?? 0],
	]);
	return {
		state: common.schedules === null ? {} : { opt_param_scheduler: scheduler },
		args: {
			consumed_train_samples: training.consumedSamples ?? 0,
			consumed_valid_samples: training.consumedValidSamples ?? 0,
			global_batch_size: training.globalBatchSize ?? null,
			seed: objectOf(common.rng).seed ?? null,
		},
	};
}
