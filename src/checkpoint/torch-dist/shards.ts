/**
 * Shards of Megatron's tensor parallelism (docs/spec/checkpoint.md §3.1–§3.3, docs/spec/language-model.md §8.1), and the order in
 * which Megatron registers parameters. Needed only to read the flat buffers of its distributed optimizer.
 */
import type { Runs } from "../mapping.ts";

/** Runs of a rank's shard: `count` runs of `length` elements of the whole tensor, contiguous and in order in the shard. */
export interface ShardRuns {
	readonly runs: Runs;
	readonly count: number;
	readonly length: number;
}

type Cut = { readonly axis: 0; readonly blocks: readonly number[] } | { readonly axis: 1 } | null;

const splitRows =
	/(word_embeddings\.weight|output_layer\.weight|linear_qkv\.(weight|bias)|softmax_offset|linear_fc1\.(weight|bias)|mixer\.(dt_bias|A_log|D|norm\.weight)|embedder\.weight|input_projections\.\d+\.encoder\.weight)$/;
const splitColumns = /(linear_proj\.weight|linear_fc2\.weight|mixer\.out_proj\.weight)$/;

/** The sharding of a parameter other than experts'; `shapes`: of the whole model, from which the blocks of fused parameters follow. */
function cutOf(name: string, shapes: ReadonlyMap<string, { readonly shape: readonly number[] }>): Cut {
	const rows = shapes.get(name)!.shape[0] ?? 1;
	const mixer = /^(.*mixer\.)(in_proj\.weight|conv1d_weight|conv1d_bias)$/.exec(name);
	if (mixer) {
		const inner = shapes.get(`${mixer[1]}norm.weight`)!.shape[0]!;
		const heads = shapes.get(`${mixer[1]}A_log`)!.shape[0]!;
		if (mixer[2] !== "in_proj.weight") {
			const state = (rows - inner) / 2;
			return { axis: 0, blocks: [inner, state, state] };
		}
		const state = (rows - 2 * inner - heads) / 2;
		return { axis: 0, blocks: [inner, inner, state, state, heads] };
	}
	if (/linear_fc1\.(weight|bias)$/.test(name)) {
		const width = shapes.get(name.replace(/fc1\.(weight|bias)$/, "fc2.weight"))?.shape[1];
		return { axis: 0, blocks: width !== undefined && rows === 2 * width ? [width, width] : [rows] };
	}
	if (splitRows.test(name)) return { axis: 0, blocks: [rows] };
	return splitColumns.test(name) ? { axis: 1 } : null;
}

/** The shard of rank `rank` of `size`; null if the sizes do not divide. */
export function shardOf(
	name: string,
	shapes: ReadonlyMap<string, { readonly shape: readonly number[] }>,
	rank: number,
	size: number,
): { readonly parts: readonly ShardRuns[]; readonly replicated: boolean } | null {
	const { shape } = shapes.get(name)!;
	const elements = shape.reduce((product, n) => product * n, 1);
	const cut = cutOf(name, shapes);
	if (cut === null || size === 1) {
		const whole = { runs: { offset: 0, stride: elements }, count: 1, length: elements };
		return { parts: [whole], replicated: cut === null };
	}
	if (cut.axis === 1) {
		const columns = shape[1]!;
		if (columns % size !== 0) return null;
		const length = columns / size;
		return {
			parts: [{ runs: { offset: rank * length, stride: columns }, count: shape[0]!, length }],
			replicated: false,
		};
	}
	const width = elements / shape[0]!;
	const parts: ShardRuns[] = [];
	let row = 0;
	for (const rows of cut.blocks) {
		if (rows % size !== 0) return null;
		const length = (rows / size) * width;
		parts.push({ runs: { offset: row * width + rank * length, stride: length }, count: 1, length });
		row += rows;
	}
	return { parts, replicated: false };
}

/** Registration order inside a layer or module. */
const leaves = [
	"conv1d_weight",
	"conv1d_bias",
	"dt_bias",
	"A_log",
	"D",
	"in_proj.layer_norm_weight",
	"in_proj.layer_norm_bias",
	"in_proj.weight",
	"conv1d.weight",
	"out_norm.weight",
	"mixer.norm.weight",
	"out_proj.weight",
	"core_attention.softmax_offset",
	"linear_proj.weight",
	"linear_proj.bias",
	"linear_proj.post_layernorm.weight",
	"linear_proj.post_layernorm.bias",
	"linear_qkv.layer_norm_weight",
	"linear_qkv.layer_norm_bias",
	"linear_qkv.weight",
	"linear_qkv.bias",
	"pre_mlp_layernorm.weight",
	"pre_mlp_layernorm.bias",
	"router.weight",
	"fc1_latent_proj.weight",
	"fc2_latent_proj.weight",
	"experts.linear_fc1.weight",
	"experts.linear_fc2.weight",
	"shared_experts.gate_weight",
	"linear_fc1.layer_norm_weight",
	"linear_fc1.layer_norm_bias",
	"linear_fc1.weight",
	"linear_fc1.bias",
	"linear_fc2.weight",
	"linear_fc2.bias",
	"linear_fc2.post_layernorm.weight",
	"linear_fc2.post_layernorm.bias",
];

/** Registration order of modules. */
const modules = [
	"class_token",
	"radio_model.position_embeddings",
	"embedder.weight",
	"video_embedder.weight",
	"word_embeddings.weight",
	"embedding.position_embeddings.weight",
	"decoder.layers.",
	"final_norm.weight",
	"final_norm.bias",
	"final_layernorm.weight",
	"final_layernorm.bias",
	"output_layer.weight",
	"encoder.linear_fc1.",
	"encoder.linear_fc2.",
	"encoder.weight",
];

/** Sorts parameters of one module into Megatron's registration order; null if a name is unknown. */
export function registrationOrder(names: readonly string[]): string[] | null {
	const ranked: { name: string; rank: readonly number[] }[] = [];
	for (const name of names) {
		const module = modules.findIndex((part) => name.includes(part));
		const layer = Number(/\bdecoder\.layers\.(\d+)\./.exec(name)?.[1] ?? 0);
		const expert = Number(/weight(\d+)$/.exec(name)?.[1] ?? 0);
		const leaf = /decoder\.layers\.|encoder\.linear_fc/.test(name)
			? leaves.findIndex((part) => name.replace(/(weight)\d+$/, "$1").endsWith(part))
			: 0;
		if (module < 0 || leaf < 0) return null;
		ranked.push({ name, rank: [module, layer, leaf, expert] });
	}
	return ranked
		.sort((a, b) => a.rank.map((value, i) => value - b.rank[i]!).find((difference) => difference !== 0) ?? 0)
		.map(({ name }) => name);
}
