/**
 * The `_extra_state` items that Megatron's Transformer Engine modules ask for when they load
 * (docs/spec/checkpoint.md §1.6, §3.1). Without FP8 they are empty, but a missing one is an error there, so every
 * export writes them.
 */

/** "empty": a list of an empty byte tensor; "none": a list of None. */
export type ExtraState = "empty" | "none";

/** Modules with a state, by the end of one of their parameters' keys. */
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
/** Modules that are no Transformer Engine ones store None. */
const none: readonly RegExp[] = [
	/^(.*\boutput_layer)\.weight$/,
	/^(.*\b(?:video_)?embedder)\.weight$/,
	/^(.*\binput_projections\.\d+\.encoder(?:\.linear_fc[12])?)\.weight$/,
];

/** Names of the items for a model's tensors on disk. Stacked layers and experts have one an index. */
export function extraStates(
	stored: ReadonlyMap<string, { readonly shape: readonly number[] }>,
): ReadonlyMap<string, ExtraState> {
	const found = new Map<string, ExtraState>();
	for (const [key, { shape }] of stored) {
		if (/(^|\.)optimizer\./.test(key)) continue;
		const experts = /^(.*\bmlp\.experts\.experts\.linear_fc[12])\.weight$/.exec(key);
		if (experts) {
			shards(found, `${experts[1]}._extra_state`, shape[0]!);
			continue;
		}
		const plain = none.map((pattern) => pattern.exec(key)?.[1]).find((module) => module !== undefined);
		if (plain !== undefined) {
			found.set(`${plain}._extra_state/shard_0_1`, "none");
			continue;
		}
		const match = modules.find(([pattern]) => pattern.test(key));
		if (!match) continue;
		const module = key.replace(...(match as [RegExp, string]));
		const stacked = /\bdecoder\.layers\.(?!\d)/.test(key);
		shards(found, `${module}._extra_state`, stacked ? shape[0]! : 1);
	}
	return found;
}

function shards(found: Map<string, ExtraState>, name: string, count: number): void {
	for (let i = 0; i < count; i++) found.set(`${name}/shard_${i}_${count}`, "empty");
}
