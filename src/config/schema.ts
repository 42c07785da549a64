/**
 * The training configuration: every key with its type, default and help, and the type the program reads. Keys are
 * Megatron's flag names without dashes in front; a TrainingConfiguration has them in camelCase.
 */
import * as v from "valibot";
import type { Field, ValueOf } from "./field.ts";
import { distillationKeys } from "./keys/distillation.ts";
import { elasticKeys } from "./keys/elastic.ts";
import { energonKeys } from "./keys/energon.ts";
import { latentAttentionKeys } from "./keys/latent-attention.ts";
import { loraKeys } from "./keys/lora.ts";
import { linearAttentionKeys, mambaKeys } from "./keys/mamba.ts";
import { modelKeys } from "./keys/model.ts";
import { moeKeys } from "./keys/moe.ts";
import { optimizerKeys, scheduleKeys } from "./keys/optimizer.ts";
import { parallelKeys } from "./keys/parallel.ts";
import { checkpointKeys, dataKeys, loggingKeys, runKeys } from "./keys/run.ts";
import { tokenizerKeys } from "./keys/tokenizer.ts";
import { visionKeys } from "./keys/vision.ts";
import { type CamelCase, camelCase } from "./names.ts";

/** Subjects in the order of help and documentation. */
export const subjects = {
	Run: runKeys,
	"Language model": modelKeys,
	"Multi-latent attention": latentAttentionKeys,
	"Mamba-2 layers": mambaKeys,
	"Gated DeltaNet layers": linearAttentionKeys,
	"Mixture of experts": moeKeys,
	"Low-rank adapters": loraKeys,
	"Elastic models": elasticKeys,
	Distillation: distillationKeys,
	Optimizer: optimizerKeys,
	"Length and schedules": scheduleKeys,
	Data: dataKeys,
	Tokenizer: tokenizerKeys,
	"Energon data": energonKeys,
	Logging: loggingKeys,
	Checkpoints: checkpointKeys,
	Layout: parallelKeys,
	Vision: visionKeys,
} as const;

export const fields = {
	...runKeys,
	...modelKeys,
	...latentAttentionKeys,
	...mambaKeys,
	...linearAttentionKeys,
	...moeKeys,
	...loraKeys,
	...elasticKeys,
	...distillationKeys,
	...optimizerKeys,
	...scheduleKeys,
	...dataKeys,
	...tokenizerKeys,
	...energonKeys,
	...loggingKeys,
	...checkpointKeys,
	...parallelKeys,
	...visionKeys,
} as const;

type Fields = typeof fields;

/** A configuration key: a flag name without dashes in front. */
export type Key = keyof Fields;

/** A typed configuration, as the whole program reads it. */
export interface TrainingConfiguration extends Readonly<{ [K in Key as CamelCase<K>]: ValueOf<Fields[K]> }> {}

/** Keys whose default derive.ts computes. */
export type DerivedKey = { [K in Key]: Fields[K] extends Field<infer _, "derived"> ? K : never }[Key];

export const keys = Object.keys(fields) as readonly Key[];

/** A key's field, without its value type. */
export function fieldOf(key: Key): Field {
	return fields[key] as Field;
}

/** Name of the key in a TrainingConfiguration. */
export function propertyOf(key: Key): keyof TrainingConfiguration {
	return camelCase(key) as keyof TrainingConfiguration;
}

/** Every key and its value as JSON, which the ranks of a run compare. */
export function textOf(c: TrainingConfiguration): Record<string, string> {
	return Object.fromEntries(keys.map((key) => [key, JSON.stringify(c[propertyOf(key)])]));
}

const known = new Map<string, Key>(
	keys.flatMap((key) => [key, ...(fieldOf(key).aliases ?? [])].map((name) => [name, key] as const)),
);

/** The key of a spelling: underscores and aliases are accepted. */
export function keyOf(name: string): Key | undefined {
	return known.get(name.replaceAll("_", "-"));
}

/** Every accepted spelling, for suggestions. */
export const spellings: readonly string[] = [...known.keys()];

/** Values of files and flags together: every key absent or of its type. */
export const trainingSchema = v.strictObject(
	Object.fromEntries(
		keys.map((key) => {
			const { type, presence } = fieldOf(key);
			return [key, v.optional(presence === "optional" ? v.nullable(type.schema) : type.schema)] as const;
		}),
	),
);
