/**
 * Sizes of single layers in config.json: `block_configs`, one entry a layer as Model-Optimizer writes them for heterogeneous models
 * (docs/spec/elastic.md §16), such as {"subblock_configs": [{"kind": "mamba", "name": "mamba", "num_heads": 8}]}. Only what differs
 * between layers is written; every other size of an entry must be the model's.
 */
import { type LayerKind, parseHybridPattern } from "../../config/hybrid-pattern.ts";
import { modelOfLayer, type PerLayerSize, perLayerSizes } from "../../config/per-layer.ts";
import type { LanguageModelConfiguration } from "./configuration.ts";

type Refuse = (sentence: string) => never;
type Lists = { readonly [List in PerLayerSize["list"]]?: readonly number[] };
type Sizes = { readonly [Size in PerLayerSize["size"]]: number };

/** The kind of a layer's entry, and its fields that are sizes of layers. */
const kinds: Readonly<
	Partial<Record<LayerKind, { readonly kind: string; readonly fields: Readonly<Record<string, keyof Sizes>> }>>
> = {
	mamba: { kind: "mamba", fields: { num_heads: "mambaNumHeads" } },
	attention: { kind: "attention", fields: { num_query_heads: "numAttentionHeads" } },
	moe: { kind: "moe", fields: { num_experts: "numExperts", expert_intermediate_size: "moeFfnHiddenSize" } },
	mlp: { kind: "ffn", fields: {} },
};

/** Fields that are the same in all layers here. */
const uniform: Readonly<Record<string, keyof LanguageModelConfiguration>> = {
	state_dim: "mambaStateDim",
	head_dim: "mambaHeadDim",
	num_groups: "mambaNumGroups",
	conv_kernel_size: "mambaConvKernelDim",
	num_kv_heads: "numQueryGroups",
	qk_head_dim: "kvChannels",
	v_head_dim: "kvChannels",
	shared_expert_intermediate_size: "moeSharedExpertIntermediateSize",
	top_k: "moeRouterTopk",
	intermediate_size: "ffnHiddenSize",
};

/** One entry for every layer of the main part. */
export function blockConfigs(configuration: LanguageModelConfiguration): unknown[] {
	return parseHybridPattern(configuration.hybridLayerPattern).map((layer, index) => {
		const { kind, fields } = kinds[layer]!;
		const own = modelOfLayer(configuration, index);
		const sizes = Object.fromEntries(Object.entries(fields).map(([field, size]) => [field, own[size]]));
		return { subblock_configs: [{ kind, name: kind, no_op: false, ...sizes }] };
	});
}

/** The sizes that `block_configs` gives to layers; {} without such a key. Throws through `bad` where an entry fits no layer of this program. */
export function ownSizesIn(blocks: unknown, model: LanguageModelConfiguration, bad: Refuse): Lists {
	if (blocks === undefined || blocks === null) return {};
	const pattern = parseHybridPattern(model.hybridLayerPattern);
	if (!Array.isArray(blocks) || blocks.length !== pattern.length) {
		return bad(`block_configs is not a list with one entry for each of the ${pattern.length} layers`);
	}
	const found = new Map<keyof Sizes, number[]>();
	for (const [index, layer] of pattern.entries()) {
		const entry = entryOf(blocks[index], kinds[layer]!.kind, `block_configs[${index}]`, bad);
		for (const [field, value] of Object.entries(entry)) {
			const shared = uniform[field];
			if (shared !== undefined && value !== null && value !== model[shared]) {
				bad(
					`block_configs[${index}]: ${field} is ${JSON.stringify(value)}, this program's layers have all ${model[shared]}`,
				);
			}
		}
		for (const [field, size] of Object.entries(kinds[layer]!.fields)) {
			const value = entry[field] ?? model[size];
			if (!Number.isSafeInteger(value) || (value as number) < 1) {
				bad(`block_configs[${index}]: ${field} is ${JSON.stringify(value)}, expected a whole number`);
			}
			found.set(size, [...(found.get(size) ?? []), value as number]);
		}
	}
	return Object.fromEntries(
		perLayerSizes.flatMap(({ size, list }) => {
			const sizes = found.get(size) ?? [];
			return sizes.every((one) => one === model[size]) ? [] : [[list, sizes]];
		}),
	);
}

/** The one sub-block of a layer's entry, which must be of its kind. */
function entryOf(block: unknown, kind: string, where: string, bad: Refuse): Readonly<Record<string, unknown>> {
	const { subblock_configs: parts } = (block ?? {}) as { readonly subblock_configs?: unknown };
	const part: unknown = Array.isArray(parts) && parts.length === 1 ? parts[0] : null;
	if (typeof part !== "object" || part === null) return bad(`${where} has not one sub-block`);
	const entry = part as Readonly<Record<string, unknown>>;
	if (entry.kind !== kind) return bad(`${where} is of kind ${JSON.stringify(entry.kind)}, its layer is one of ${kind}`);
	if (entry.no_op === true)
		return bad(`${where} is a no_op, and this program's layers all compute; leave it out of the pattern`);
	return entry;
}
