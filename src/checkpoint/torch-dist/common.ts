/**
 * Converts Megatron's common state (docs/spec/checkpoint.md §1.7, §3.6) to JSON and back: arguments, learning-rate schedule,
 * counters and optimizer groups. Instances of Python classes are not written back.
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { dtypes, elementCount, isDtypeTag } from "../dtype.ts";
import { type Copy, MappedStore, type MappedTensor } from "../mapping.ts";
import type { Json } from "../native/manifest.ts";
import { openTorchFile } from "../pickle/archive.ts";
import { Global, PythonObject, TorchDtype, Tuple } from "../pickle/values.ts";
import { PythonFloat } from "../pickle/writer.ts";
import type { TensorStore } from "../store.ts";
import type { TorchDistFolder } from "./folder.ts";

/** Most values of a state: shared references could make the JSON of a small pickle huge. */
const LARGEST_STATE = 2_000_000;
const DEEPEST_STATE = 64;

export type JsonObject = { readonly [key: string]: Json };

/**
 * The JSON of a Python value: tuples become lists, dtypes their names, instances of a class `{"__class__": …}`. `where`: the
 * file or item that the error about a too large value names.
 */
export function jsonOf(value: unknown, where: string): Json {
	let nodes = 0;
	/** Keys and indices from the root to the current value. */
	const path: string[] = [];
	const at = (key: string, item: unknown): Json => {
		path.push(key);
		const json = visit(item);
		path.pop();
		return json;
	};
	const list = (items: Iterable<unknown>): Json => Array.from(items, (item, i) => at(String(i), item));
	const visit = (entry: unknown): Json => {
		if (++nodes > LARGEST_STATE || path.length > DEEPEST_STATE) {
			const key = path.slice(0, 3).join(".") || "the object itself";
			throw new UserError(
				`${where}: ${key} has more than ${DEEPEST_STATE} levels, or the object more than ${LARGEST_STATE} values.`,
			);
		}
		if (entry === null || typeof entry === "boolean" || typeof entry === "string") return entry;
		if (typeof entry === "number") return Number.isFinite(entry) ? entry : { __float__: String(entry) };
		if (typeof entry === "bigint") return entry.toString();
		if (entry instanceof TorchDtype) return `torch.${dtypes[entry.tag].torch}`;
		if (entry instanceof Tuple) return list(entry.items);
		if (Array.isArray(entry) || entry instanceof Set) return list(entry);
		if (entry instanceof Map) return object(entry);
		if (entry instanceof PythonObject) {
			if (/^(argparse|types)\./.test(String(entry.type)) && entry.state instanceof Map) return object(entry.state);
			return { __class__: String(entry.type), args: list(entry.args) };
		}
		return { __class__: (entry as object).constructor?.name ?? "unknown" };
	};
	const object = (entries: ReadonlyMap<unknown, unknown>): Json =>
		Object.fromEntries(
			Array.from(entries, ([key, item]) => {
				const name =
					typeof key === "string" || typeof key === "number" ? String(key) : JSON.stringify(at("a key", key));
				return [name, at(name, item)];
			}),
		);
	return visit(value);
}

/** The Python value of JSON; undefined for an instance of a class, whose key is then left out. */
export function pythonOf(value: Json): unknown {
	if (typeof value === "string") {
		const tag = Object.entries(dtypes).find(([, { torch }]) => value === `torch.${torch}`)?.[0];
		return isDtypeTag(tag) ? new TorchDtype(tag) : value;
	}
	if (Array.isArray(value)) {
		const items = value.map(pythonOf);
		return items.includes(undefined) ? undefined : items;
	}
	if (typeof value !== "object" || value === null) return value;
	const entries = value as JsonObject;
	if (typeof entries.__float__ === "string") return new PythonFloat(Number(entries.__float__));
	if (entries.__class__ !== undefined) return undefined;
	return pythonMap(entries);
}

export function pythonMap(entries: JsonObject): Map<string, unknown> {
	return new Map(
		Object.entries(entries)
			.map(([key, entry]) => [key, pythonOf(entry)] as const)
			.filter(([, entry]) => entry !== undefined),
	);
}

/** argparse's Namespace with these attributes. */
export function namespace(attributes: JsonObject): PythonObject {
	const object = new PythonObject(new Global("argparse", "Namespace"), []);
	object.state = pythonMap(attributes);
	return object;
}

export function isJsonObject(value: Json | undefined): value is JsonObject {
	return typeof value === "object" && value !== null && !Array.isArray(value);
}

// Reads the common state and the optimizer groups of a torch_dist checkpoint as JSON (docs/spec/checkpoint.md §1.7,
// §3.6).

/** Most chained optimizers of a module; Megatron chains two or three. */
const MOST_CHAINS = 64;

const commonItem = "common_state/shard_0_1";

/** The state in common.pt, which upstream prefers too, else in the byte item; {} without either. */
export function readCommon(folder: TorchDistFolder, inert: readonly string[]): JsonObject {
	const path = join(folder.path, "common.pt");
	let state: Json = {};
	if (existsSync(path)) {
		using file = openTorchFile(path, { inert, inside: folder.path });
		state = jsonOf(file.value, path);
	} else if (folder.objects.has(commonItem)) state = itemJson(folder, commonItem, inert);
	if (!isJsonObject(state)) throw new UserError(`The common state of ${folder.path} is not a dictionary.`);
	return state;
}

function itemJson(folder: TorchDistFolder, name: string, inert: readonly string[]): Json {
	return jsonOf(folder.readObject(name, { inert }), `${folder.path} (${name})`);
}

/** Parameter groups by module, a list for each chained optimizer, without the parameters. */
export function readParameterGroups(
	folder: TorchDistFolder,
	common: JsonObject,
	inert: readonly string[],
): Record<string, JsonObject[][]> {
	const groups = new Map<string, JsonObject[][]>();
	const add = (module: string, chain: number, value: Json | undefined) => {
		if (!Array.isArray(value)) return;
		if (chain > MOST_CHAINS)
			throw new UserError(`${folder.path}: module ${module} has optimizer ${chain}; at most ${MOST_CHAINS} are read.`);
		const chains = groups.get(module) ?? [];
		groups.set(module, chains);
		chains[chain] = value.filter(isJsonObject).map(({ params: _, ...group }) => group);
	};
	for (const name of folder.objects.keys()) {
		const item = /^mimo\.([^.]+)\.optimizer\.mimo\.[^.]+?(?:\.(\d+))?\.param_groups\/shard_0_1$/.exec(name);
		if (item) add(item[1]!, Number(item[2] ?? 0), itemJson(folder, name, inert));
		const buffers = /^(?:mimo\.([^.]+)\.)?(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer\//.exec(
			name,
		);
		if (buffers) {
			const state = itemJson(folder, name, inert);
			if (isJsonObject(state)) add(buffers[1] ?? "language", Number(buffers[2] ?? 0), state.param_groups);
		}
	}
	const plain = common.optimizer;
	if (isJsonObject(plain)) {
		const chains = isJsonObject(plain.optimizer) ? [plain] : Object.values(plain);
		chains.forEach((chain, index) => {
			if (isJsonObject(chain) && isJsonObject(chain.optimizer)) add("language", index, chain.optimizer.param_groups);
		});
	}
	return Object.fromEntries(groups);
}

// The `_extra_state` items of Transformer Engine modules (docs/spec/checkpoint.md §1.6, §3.1). They are empty without FP8, but
// Megatron refuses a checkpoint that lacks them, so every export writes them.

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
