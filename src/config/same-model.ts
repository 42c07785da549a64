/**
 * Compares the models of two configurations: whether weights of one are weights of the other, with the same meaning. Each key
 * declares whether it decides that (keys/), by default all keys of a model's groups, so that a new key is compared unless it is
 * exempt.
 */
import { UserError } from "../system/errors.ts";
import type { ModelPart } from "./field.ts";
import { hasLayer, type LayerKind, storedPattern } from "./hybrid-pattern.ts";
import { latentAttentionKeys } from "./keys/latent-attention.ts";
import { linearAttentionKeys, mambaKeys } from "./keys/mamba.ts";
import { modelKeys } from "./keys/model.ts";
import { moeKeys } from "./keys/moe.ts";
import { visionKeys } from "./keys/vision.ts";
import { modelOfModules } from "./modules.ts";
import { perLayerSizes, windowedLayers } from "./per-layer.ts";
import { fieldOf, type Key, keys, propertyOf } from "./schema.ts";

/**
 * Values by their names in a TrainingConfiguration: of a run, of a checkpoint's run, or the model's keys that a checkpoint of
 * another format has.
 */
export type ModelDescription = Readonly<Record<string, unknown>>;

const has = (c: ModelDescription, ...kinds: LayerKind[]) => hasLayer(String(c.hybridLayerPattern), ...kinds);
const hasEncoder = (c: ModelDescription) => c.modelProvider === "nemotron-moe-vlm" && c.llmOnly !== true;

export const hasAdapters = (c: ModelDescription) => (c.loraRank ?? null) !== null;
export const hasRouter = (c: ModelDescription) => c.flextron === true;

const learnsPositions = (c: ModelDescription) => c.positionEmbeddingType === "learned_absolute";

const isYarn = (c: ModelDescription) => c.positionEmbeddingType === "yarn";

/** Parts that may be added to the weights of a model without them. */
const additions: readonly ModelPart[] = ["adapters", "router"];

/** Whether a model has a part. */
const presence: Readonly<Record<ModelPart, (c: ModelDescription) => boolean>> = {
	"language model": () => true,
	attention: (c) => has(c, "attention"),
	"latent attention": (c) => has(c, "latentAttention"),
	"attention heads": (c) => has(c, "attention", "latentAttention"),
	positions: (c) => has(c, "attention") || learnsPositions(c),
	"learned positions": learnsPositions,
	"rotary embedding": (c) =>
		has(c, "latentAttention") || (has(c, "attention") && (c.positionEmbeddingType === "rope" || isYarn(c))),
	YaRN: (c) => (has(c, "latentAttention") && c.ropeType !== "rope") || (has(c, "attention") && isYarn(c)),
	"dense MLP": (c) => has(c, "mlp"),
	MLP: (c) => has(c, "mlp", "moe"),
	Mamba: (c) => has(c, "mamba"),
	"Gated DeltaNet": (c) => has(c, "gdn"),
	experts: (c) => has(c, "moe"),
	"softmax router": (c) => has(c, "moe") && c.moeRouterScoreFunction === "softmax",
	adapters: hasAdapters,
	router: hasRouter,
	encoder: hasEncoder,
	"MLP projector": (c) => hasEncoder(c) && c.visionProjectionType === "mlp",
};

/** The part that a group's keys describe by default. */
const groups: readonly (readonly [keys: object, part: ModelPart])[] = [
	[modelKeys, "language model"],
	[latentAttentionKeys, "latent attention"],
	[mambaKeys, "Mamba"],
	[linearAttentionKeys, "Gated DeltaNet"],
	[moeKeys, "experts"],
	[visionKeys, "encoder"],
];

/** The part of a model that a key describes; null: none, so a different value makes no different model. */
export function modelPartOf(key: Key): ModelPart | null {
	const { model, alwaysOn, noEffect } = fieldOf(key);
	if (model !== undefined) return model || null;
	if (alwaysOn || noEffect !== undefined) return null;
	return groups.find(([group]) => key in group)?.[1] ?? null;
}

/** Keys that make the model, in the order of the help. */
export const modelMakingKeys: readonly Key[] = keys.filter((key) => modelPartOf(key) !== null);

/** The value of a key; undefined: unknown from the description. */
function valueIn(description: ModelDescription, key: Key): unknown {
	const property = propertyOf(key);
	// Pipeline cuts and repetitions of an MTP depth make no different model.
	if (property === "hybridLayerPattern" && property in description) {
		return storedPattern(String(description[property]), { repeated: description.mtpUseRepeatedLayer === true });
	}
	if (property === "windowAttnSkipFreq" && Array.isArray(description[property])) {
		return windowedLayers(description as unknown as Parameters<typeof windowedLayers>[0]);
	}
	const own = perLayerSizes.find(({ list }) => list === property);
	if (own && description[own.size] !== undefined) {
		const sizes = description[own.list] ?? null;
		// A list of equal sizes is the same model as the common size alone.
		return Array.isArray(sizes) && sizes.every((size) => size === description[own.size]) ? null : sizes;
	}
	// Beside a list, the common size matters to MTP depths alone.
	const listed = perLayerSizes.find(({ size }) => size === property);
	if (listed && Array.isArray(description[listed.list]) && !String(description.hybridLayerPattern).includes("/")) {
		return undefined;
	}
	// A run's whole configuration lacks only keys that are newer than it, which acted as their defaults do.
	const whole = "modelProvider" in description;
	const standing = whole ? (fieldOf(key).default ?? undefined) : undefined;
	const value = property in description ? description[property] : standing;
	return property === "modules" && Array.isArray(value) ? modelOfModules(value) : value;
}

/** The keys of a model's parts that a description has, with their values. */
export function describedKeys(description: ModelDescription): { readonly key: Key; readonly value: unknown }[] {
	return modelMakingKeys.flatMap((key) => {
		const value = description[propertyOf(key)];
		return value === undefined || !presence[modelPartOf(key)!](description) ? [] : [{ key, value }];
	});
}

/** "--hidden-size is 128 there and 256 here", for every key that makes the model and differs. */
export function modelDifferences(there: ModelDescription, here: ModelDescription): string[] {
	return modelMakingKeys.flatMap((key) => {
		const part = modelPartOf(key)!;
		// Weights without adapters or router may be given any.
		if (!presence[part](additions.includes(part) ? there : here)) return [];
		const [other, own] = [valueIn(there, key), valueIn(here, key)];
		const same = other === undefined || own === undefined || Bun.deepEquals(other, own);
		return same ? [] : [`--${key} is ${other ?? "unset"} there and ${own ?? "unset"} here`];
	});
}

/** Throws a UserError with every difference between the model of `path` and this run's. */
export function requireSameModel(path: string, there: ModelDescription, here: ModelDescription): void {
	const differences = modelDifferences(there, here);
	if (differences.length > 0) throw new UserError(`${path} holds another model: ${differences.join("; ")}.`);
}
