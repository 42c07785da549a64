/**
 * The options of the language model, each once in the tables of keys/, and all that follows from them: defaults, the descriptions of models in checkpoints, and
 * the places of values in a model's configuration (docs/add-an-option.md).
 */
import type { ModelPart, Presence, ValueOf } from "./field.ts";
import { latentAttentionKeys } from "./keys/latent-attention.ts";
import { linearAttentionKeys, mambaKeys } from "./keys/mamba.ts";
import { modelKeys } from "./keys/model.ts";
import { moeKeys } from "./keys/moe.ts";
import type { CamelCase } from "./names.ts";
import { type PerLayerSize, perLayerSizes } from "./per-layer.ts";
import { modelPartOf } from "./same-model.ts";
import { fieldOf, type fields, type Key, keys, propertyOf, type TrainingConfiguration } from "./schema.ts";

const table = { ...modelKeys, ...latentAttentionKeys, ...mambaKeys, ...linearAttentionKeys, ...moeKeys } as const;

type Table = typeof table;
export type LanguageKey = keyof Table;
type Values = { readonly [K in LanguageKey as CamelCase<K>]: ValueOf<Table[K]> };
/** Properties of the keys whose fields are of a type. */
type PropertyOf<FieldType> = { [K in LanguageKey]: Table[K] extends FieldType ? CamelCase<K> : never }[LanguageKey];

/** Parts that few families have; a family with one tells its keys. */
const rareParts = ["rotary embedding", "YaRN", "latent attention", "Gated DeltaNet"] as const;

type Rare =
	| PropertyOf<{ readonly model: (typeof rareParts)[number] }>
	| CamelCase<keyof typeof latentAttentionKeys | keyof typeof linearAttentionKeys>
	| PerLayerSize["list"]
	| "mtpUseRepeatedLayer";
type Silent = PropertyOf<
	{ readonly model: false } | { readonly told: false } | { readonly noEffect: string } | { readonly alwaysOn: true }
>;
type Told = Exclude<keyof Values, Rare | Silent> | PropertyOf<{ readonly told: true }>;
type Standing = PropertyOf<{ readonly presence: "default" | "optional" }>;

/** A language model as a checkpoint describes it. A key that is absent has its default, or the format does not tell it. */
export interface LanguageModelConfiguration extends Pick<Values, Told>, Partial<Omit<Values, Told>> {}

/** The keys of a model's description, those that few models have among them. */
export const toldKeys: readonly LanguageKey[] = (Object.keys(table) as LanguageKey[]).filter(
	(key) => fieldOf(key).told ?? modelPartOf(key) !== null,
);

function isRare(key: LanguageKey): boolean {
	const lists: readonly string[] = perLayerSizes.map((size) => size.key);
	const parts: readonly (ModelPart | null)[] = rareParts;
	return parts.includes(modelPartOf(key)) || lists.includes(key) || key === "mtp-use-repeated-layer";
}

const hasDefault = (key: Key) => (["default", "optional"] as readonly Presence[]).includes(fieldOf(key).presence);

function defaultsOf(which: readonly Key[]): object {
	return Object.fromEntries(which.filter(hasDefault).map((key) => [propertyOf(key), fieldOf(key).default]));
}

/** Defaults of the keys that every description tells; a family states only those that differ. */
export const familyDefaults = defaultsOf(toldKeys.filter((key) => !isRare(key))) as Pick<Values, Told & Standing>;

type AllFields = typeof fields;
type Defaults = {
	readonly [K in Key as AllFields[K] extends { readonly presence: "default" | "optional" }
		? CamelCase<K>
		: never]: ValueOf<AllFields[K]>;
};
const defaults = defaultsOf(keys) as Defaults;

/** A configuration that may lack any key with a default. */
export type SparseConfiguration = Pick<
	TrainingConfiguration,
	Exclude<PropertyOf<{ readonly presence: "required" | "derived" }> & Told, "numLayers" | "maxPositionEmbeddings">
> &
	Partial<TrainingConfiguration>;

/** The description with the defaults of the keys that it lacks. */
export function withDefaults<C extends Partial<TrainingConfiguration>>(description: C): Defaults & C {
	return { ...defaults, ...description };
}

/** The keys whose place in the model's configuration begins with the prefix, by the rest of the place: "attention." → outputGate. */
export type At<Prefix extends string> = {
	readonly [K in LanguageKey as Table[K] extends { readonly place: `${Prefix}${infer Name}` }
		? Name extends `${string}.${string}`
			? never
			: Name
		: never]: ValueOf<Table[K]>;
};

/** By the prefix of their places. */
const placed = Map.groupBy(
	(Object.keys(table) as LanguageKey[]).flatMap((key) => {
		const { place = "", default: standing } = fieldOf(key);
		const [, prefix, name] = /^(.*\.|)(\w+)$/.exec(place) ?? [];
		return name === undefined ? [] : [{ prefix, name, property: propertyOf(key), standing }];
	}),
	({ prefix }) => prefix,
);

/** The values at a place of the model's configuration; absent keys have their defaults. */
export function valuesAt<Prefix extends string>(prefix: Prefix, c: Partial<TrainingConfiguration>): At<Prefix> {
	const values: Record<string, unknown> = {};
	for (const { name, property, standing } of placed.get(prefix) ?? []) values[name] = c[property] ?? standing;
	return values as unknown as At<Prefix>;
}
