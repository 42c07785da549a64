/**
 * The `_extra_state` items of Transformer Engine modules (docs/spec/checkpoint.md §1.6, §3.1). They are empty without FP8, but
 * Megatron refuses a checkpoint that lacks them, so every export writes them.
 */

/** "empty": a list with an empty byte tensor; "none": a list with None. */
export type ExtraState = "empty" | "none";

/** Modules with an extra state, found by the key of a parameter. */
const modules: readonly (readonly [RegExp, string])[] = [
	[/^(.*\bmixer\.in_proj)\.layer_norm_weight$/, "$1"],
	[/^(.*\bmixer\.out_proj)\.weight$/, "$1"],
	[/^(.*\bself_attention\.linear_(?:qkv|proj))\.weight$/, "$1"],
	[/^(.*\bmlp\.(?:shared_experts\.)?linear_fc[12])\.weight$/, "$1"],
	[/^(.*\bpre_mlp_layernorm)\.weight$/, "$1"],
	[/^(.*\bdecoder\.final_(?:norm|layernorm))\.weight$/, "$1"],
	[/^(.*\b(?:fc1|fc2)_latent_proj)\.weight$/, "$1"],
	[/^(.*\b(?:eh_proj|enorm|hnorm|final_layernorm))\.weight$/, "$1"],
];
/** Modules of other libraries than Transformer Engine; they store None. */
const none: readonly RegExp[] = [
	/^(.*\boutput_layer)\.weight$/,
	/^(.*\b(?:video_)?embedder)\.weight$/,
	/^(.*\binput_projections\.\d+\.encoder(?:\.linear_fc[12])?)\.weight$/,
];

/**
 * Names of the extra states for the stored tensors of a model. Stacked layers and experts have an item for each index.
 * `outputLayer`: whether the output layer has an item, as in a hybrid model whose layers have their own numbers.
 */
export function extraStates(
	stored: ReadonlyMap<string, { readonly shape: readonly number[] }>,
	{ outputLayer = true }: { readonly outputLayer?: boolean } = {},
): ReadonlyMap<string, ExtraState> {
	const found = new Map<string, ExtraState>();
	for (const [key, { shape }] of stored) {
		if (/(^|\.)optimizer\./.test(key)) continue;
		const experts = /^(.*\bmlp\.experts\.experts\.linear_fc[12])\.weight$/.exec(key);
		const stacked = /\bdecoder\.layers\.(?!\d)/.test(key);
		if (experts) {
			shards(found, `${experts[1]}._extra_state`, shape.slice(0, stacked ? 2 : 1));
			continue;
		}
		if (!outputLayer && key.endsWith("output_layer.weight")) continue;
		const plain = none.map((pattern) => pattern.exec(key)?.[1]).find((module) => module !== undefined);
		if (plain !== undefined) {
			found.set(`${plain}._extra_state/shard_0_1`, "none");
			continue;
		}
		const match = modules.find(([pattern]) => pattern.test(key));
		if (!match) continue;
		const module = key.replace(...(match as [RegExp, string]));
		shards(found, `${module}._extra_state`, [stacked ? shape[0]! : 1]);
	}
	return found;
}

/** Adds an item for each position on the axes: `shard_<position, with dots>_<axes, with dots>`. */
function shards(found: Map<string, ExtraState>, name: string, axes: readonly number[]): void {
	let places: string[] = [""];
	for (const count of axes) {
		places = places.flatMap((place) => Array.from({ length: count }, (_, i) => `${place}${place && "."}${i}`));
	}
	for (const place of places) found.set(`${name}/shard_${place}_${axes.join(".")}`, "empty");
}
