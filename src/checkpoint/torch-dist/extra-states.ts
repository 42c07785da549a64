/**
 * The `_extra_state` items of Transformer Engine modules (docs/spec/checkpoint.md §1.6, §3.1). They are empty without FP8, but
 * Megatron refuses a checkpoint that lacks them, so every export writes them.
 */
import { UserError } from "../../system/errors.ts";
import { elementCount } from "../dtype.ts";
import { type Copy, MappedStore, type MappedTensor } from "../mapping.ts";
import type { TensorStore } from "../store.ts";

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

// Reads optimizer tensors that Megatron 0.12 to 0.15 stored flattened (docs/spec/checkpoint.md §1.8) as whole
// tensors: the leading axes index the cells of a regular grid over the tensor, the last axis the elements of a cell.

/** The store with whole tensors in place of flattened tensors; `shapes`: of the whole tensors, by name. */
export function unflatten(store: TensorStore, shapes: ReadonlyMap<string, readonly number[]>): TensorStore {
	if (shapes.size === 0) return store;
	return new MappedStore(
		store,
		[...store.tensors].map(([name, { dtype, shape }]): MappedTensor => {
			const whole = shapes.get(name);
			if (whole) return { name, dtype, shape: whole, copies: cellCopies(store.path, name, shape, whole) };
			const length = elementCount(shape)!;
			const runs = { offset: 0, stride: length };
			return { name, dtype, shape, copies: [{ source: name, from: runs, to: runs, count: 1, length }] };
		}),
	);
}

/** Most rows of cells of a tensor; Megatron has a cell for each rank. */
const MOST_COPIES = 2 ** 22;

function cellCopies(path: string, name: string, stored: readonly number[], whole: readonly number[]): Copy[] {
	const grid = stored.slice(0, -1);
	const cell = whole.map((size, axis) => size / grid[axis]!);
	const elements = elementCount(cell);
	if (
		whole.length === 0 ||
		grid.length !== whole.length ||
		stored.includes(0) ||
		!cell.every(Number.isInteger) ||
		elements !== stored.at(-1)
	) {
		throw new UserError(`${path}: ${name} of shape [${stored}] is not a flattened tensor of shape [${whole}].`);
	}
	const strides = whole.map((_, axis) => elementCount(whole.slice(axis + 1))!);
	const last = cell.length - 1;
	const length = cell[last]!;
	const copies: Copy[] = [];
	for (const at of indices(grid)) {
		const origin = at.reduce((sum, index, axis) => sum + index * cell[axis]! * strides[axis]!, 0);
		const from = at.reduce((sum, index, axis) => sum * grid[axis]! + index, 0) * elements;
		// Rows of the cell: the second-last axis has a constant stride, the axes before it are enumerated.
		const rows = last > 0 ? cell[last - 1]! : 1;
		[...indices(cell.slice(0, Math.max(0, last - 1)))].forEach((inner, block) => {
			const offset = inner.reduce((sum, index, axis) => sum + index * strides[axis]!, origin);
			copies.push({
				source: name,
				from: { offset: from + block * rows * length, stride: length },
				to: { offset, stride: last > 0 ? strides[last - 1]! : length },
				count: rows,
				length,
			});
			if (copies.length > MOST_COPIES) throw new UserError(`${path}: ${name} is cut into too many cells.`);
		});
	}
	return copies;
}

/** All index tuples below `sizes`, the last index fastest. */
function* indices(sizes: readonly number[]): Generator<readonly number[]> {
	const [first, ...rest] = sizes;
	if (first === undefined) {
		yield [];
		return;
	}
	for (let i = 0; i < first; i++) for (const tail of indices(rest)) yield [i, ...tail];
}
