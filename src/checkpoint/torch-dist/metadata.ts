/**
 * The .metadata of a distributed checkpoint (docs/spec/checkpoint.md §1.2): its tensor chunks and byte items, and their positions
 * in files. Storage is looked up by name and offsets; the index hint is ignored.
 */
import { UserError } from "../../system/errors.ts";
import { type Box, partitionFault } from "../chunks.ts";
import { elementCount, tensorBytes } from "../dtype.ts";
import { requirePlainName } from "../folders.ts";
import type { Runs } from "../mapping.ts";
import { metadataGlobals } from "../pickle/allowed.ts";
import { unpickle } from "../pickle/machine.ts";
import { PythonObject, TorchDtype, Tuple } from "../pickle/values.ts";
import type { TensorType } from "../store.ts";

/** A torch.save archive inside a .distcp file. */
export interface StoredItem {
	readonly file: string;
	readonly position: number;
	readonly length: number;
}

export interface StoredChunk extends Box, StoredItem {}

export interface StoredTensor extends TensorType {
	readonly chunks: readonly StoredChunk[];
}

export interface Catalog {
	readonly tensors: ReadonlyMap<string, StoredTensor>;
	/** Byte items by name ("key/shard_0_1"). */
	readonly objects: ReadonlyMap<string, StoredItem>;
	/**
	 * Whole shapes of tensors that are stored as flattened parts (docs/spec/checkpoint.md §1.8); empty in current
	 * checkpoints.
	 */
	readonly flattened: ReadonlyMap<string, readonly number[]>;
}

const LARGEST_RANK = 32;

/** Reads and checks .metadata; errors name `path`. */
export function parseMetadata(bytes: Uint8Array, path: string): Catalog {
	const bad: Refuse = (sentence) => {
		throw new UserError(`${path} is not a valid checkpoint index: ${sentence}.`);
	};
	const root = unpickle(bytes, path, { allowed: metadataGlobals });
	if (!(root instanceof PythonObject) || !/Metadata$/.test(root.type.name)) return bad("it holds no Metadata");
	const described = root.attribute("state_dict_metadata");
	const stored = root.attribute("storage_data");
	if (!(described instanceof Map) || !(stored instanceof Map)) return bad("it has no tensors or no storage");

	const items = storageItems(stored, path, bad);
	const tensors = new Map<string, StoredTensor>();
	const objects = new Map<string, StoredItem>();
	for (const [name, entry] of described) {
		if (typeof name !== "string" || !(entry instanceof PythonObject)) return bad("an entry has no name");
		if (entry.type.name === "BytesStorageMetadata") {
			objects.set(name, items.get(itemKey(name)) ?? bad(`object ${name} is stored nowhere`));
		} else if (entry.type.name === "TensorStorageMetadata") {
			tensors.set(name, tensorOf(name, entry, items, bad));
		} else bad(`entry ${name} is a ${entry.type}`);
	}
	return { tensors, objects, flattened: flattenedShapes(root, bad) };
}

type Refuse = (sentence: string) => never;

/** Whole shapes of the optimizer tensors that Megatron 0.12 to 0.15 flattened (docs/spec/checkpoint.md §1.8). */
function flattenedShapes(root: PythonObject, bad: Refuse): ReadonlyMap<string, readonly number[]> {
	const data = root.attribute("mcore_data");
	const shapes = new Map<string, readonly number[]>();
	for (const [name, entry] of data instanceof Map ? data : []) {
		const shape = entry instanceof Map ? entry.get("nd_reformulated_orig_global_shape") : undefined;
		if (typeof name === "string" && shape !== undefined && shape !== null) shapes.set(name, sizesOf(shape, name, bad));
	}
	return shapes;
}

function itemKey(name: string, offsets?: readonly number[]): string {
	return offsets ? `${name}\0${offsets.join(",")}` : name;
}

function storageItems(stored: Map<unknown, unknown>, path: string, bad: Refuse): Map<string, StoredItem> {
	const items = new Map<string, StoredItem>();
	for (const [index, information] of stored) {
		if (!(index instanceof PythonObject) || !(information instanceof PythonObject)) return bad("storage has no index");
		const name = index.attribute("fqn");
		if (typeof name !== "string") return bad("storage has no name");
		const offset = index.attribute("offset");
		const offsets = offset === undefined || offset === null ? undefined : sizesOf(offset, name, bad);
		const file = information.attribute("relative_path");
		const position = information.attribute("offset");
		const length = information.attribute("length");
		if (typeof file !== "string") return bad(`${name} has no file`);
		if (!isSize(position) || !isSize(length) || !Number.isSafeInteger(position + length)) {
			return bad(`${name} has an invalid position in ${file}`);
		}
		const transforms = information.attribute("transform_descriptors");
		if (Array.isArray(transforms) && transforms.length > 0) {
			bad(`${name} is stored with ${JSON.stringify(transforms)}, and no such transformation is supported`);
		}
		const key = itemKey(name, offsets);
		if (items.has(key)) bad(`${name} is stored twice${offsets ? ` at [${offsets}]` : ""}`);
		items.set(key, { file: requirePlainName(file, `${path}: ${name}`), position, length });
	}
	return items;
}

function tensorOf(
	name: string,
	entry: PythonObject,
	items: ReadonlyMap<string, StoredItem>,
	bad: Refuse,
): StoredTensor {
	const shape = sizesOf(entry.attribute("size"), name, bad);
	const properties = entry.attribute("properties");
	const state = properties instanceof PythonObject ? properties.state : undefined;
	const dtype = state instanceof Tuple ? state.items[0] : undefined;
	if (!(dtype instanceof TorchDtype)) return bad(`tensor ${name} has no dtype`);
	if (state instanceof Tuple && state.items[1] !== "torch.strided") bad(`tensor ${name} is not strided`);
	const chunks = entry.attribute("chunks");
	if (!Array.isArray(chunks)) return bad(`tensor ${name} has no chunks`);
	const stored = chunks.map((chunk): StoredChunk => {
		if (!(chunk instanceof PythonObject)) return bad(`tensor ${name} has an invalid chunk`);
		const offsets = sizesOf(chunk.attribute("offsets"), name, bad);
		const sizes = sizesOf(chunk.attribute("sizes"), name, bad);
		const item = items.get(itemKey(name, offsets)) ?? bad(`tensor ${name} has no storage at [${offsets}]`);
		// Each layer and expert gets a name, so their number is bounded by the bytes that the file can hold.
		const bytes = tensorBytes(dtype.tag, sizes);
		if (bytes === null || bytes > item.length) {
			return bad(`tensor ${name} has a chunk of [${sizes}] ${dtype.tag} in an item of ${item.length} bytes`);
		}
		return { offsets, sizes, ...item };
	});
	if (elementCount(shape) === null || tensorBytes(dtype.tag, shape) === null) {
		bad(`tensor ${name} of shape [${shape}] has an invalid size`);
	}
	const fault = partitionFault(shape, stored);
	if (fault) bad(`tensor ${name} ${fault}`);
	return { dtype: dtype.tag, shape, chunks: stored };
}

function isSize(value: unknown): value is number {
	return Number.isSafeInteger(value) && (value as number) >= 0;
}

function sizesOf(value: unknown, name: string, bad: Refuse): readonly number[] {
	const items = value instanceof Tuple ? value.items : value;
	if (!Array.isArray(items) || items.length > LARGEST_RANK || !items.every(isSize)) {
		return bad(`${name} has an invalid size or offset`);
	}
	return items;
}

// Shards of Megatron's tensor parallelism (docs/spec/checkpoint.md §3.1–§3.3, docs/spec/language-model.md §8.1), and the order in
// which Megatron registers parameters. Needed only to read the flat buffers of its distributed optimizer.

/** Runs of a rank's shard: `count` runs of `length` elements of the whole tensor, contiguous and in order in the shard. */
export interface ShardRuns {
	readonly runs: Runs;
	readonly count: number;
	readonly length: number;
}

type Cut = { readonly axis: 0; readonly blocks: readonly number[] } | { readonly axis: 1 } | null;

const splitRows =
	/(word_embeddings\.weight|output_layer\.weight|linear_qkv\.(weight|bias)|softmax_offset|linear_(q|q_up|kv_up)_proj\.weight|linear_fc1\.(weight|bias)|mixer\.(dt_bias|A_log|D|norm\.weight)|embedder\.weight|input_projections\.\d+\.encoder\.weight)$/;
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
	"input_layernorm.weight",
	"input_layernorm.bias",
	"core_attention.softmax_offset",
	"linear_proj.weight",
	"linear_proj.bias",
	"linear_proj.post_layernorm.weight",
	"linear_proj.post_layernorm.bias",
	"linear_q_proj.weight",
	"linear_q_down_proj.weight",
	"linear_q_up_proj.layer_norm_weight",
	"linear_q_up_proj.weight",
	"linear_kv_down_proj.weight",
	"linear_kv_up_proj.layer_norm_weight",
	"linear_kv_up_proj.weight",
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
