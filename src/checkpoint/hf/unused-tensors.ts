/**
 * Tensors of a Hugging Face folder that have no place in the model and do not change what it computes of text and pictures.
 * A folder that is written for the same model gets them back unchanged. Any other tensor without a place is an error that
 * names it.
 */
import { clipStatistics } from "../../native/images.ts";
import { UserError } from "../../system/errors.ts";
import { decodeFloats, isFloatDtype } from "../dtype.ts";
import { readPieces, readTensor, type TensorStore, type TensorType, typeOf } from "../store.ts";

interface LeftOut {
	readonly name: RegExp;
	/** Reason that the tensor can be omitted; completes "NAME is left out: …". */
	readonly reason: string;
	/** Name in the tower's config.json, and default, of the values that the tensor must have for the reason to hold. */
	readonly values?: readonly [name: string, otherwise: readonly number[]];
	/** The tensor that it has to be equal to; a folder that is written later holds that alone. */
	readonly repeats?: (name: string) => string;
	/** Whether it belongs to a whole module, perhaps of gigabytes, which checkpoints of other formats do not keep. */
	readonly module?: boolean;
}

/** A layer of multi-token prediction in a model that is trained without. */
const ahead: Omit<LeftOut, "name"> = {
	reason: "it predicts further tokens, which the model is trained without",
	module: true,
};

const table: readonly LeftOut[] = [
	{
		name: /(^|\.)summary_idxs$/,
		reason: "it says which class tokens make RADIO's own summary, and the model uses all of them",
	},
	{
		name: /(^|\.)input_conditioner\.norm_mean$/,
		reason: "images are normalised by this mean as they are read",
		values: ["norm_mean", clipStatistics.mean],
	},
	{
		name: /(^|\.)input_conditioner\.norm_std$/,
		reason: "images are normalised by this deviation as they are read",
		values: ["norm_std", clipStatistics.deviation],
	},
	{
		name: /(^|\.)(patch_generator\.video_embedder|embeddings\.video_patch_projection)\.weight$/,
		reason: "it embeds frames of videos, which are not trained on",
	},
	{
		name: /(^|\.)(vision_model|vision_tower)\.head\.(probe|attention|layernorm|mlp)\b|^head\.(probe|attention|layernorm|mlp)\b/,
		reason: "it pools the patches of SigLIP to one row, and the model reads all of them",
	},
	{
		name: /^(text_model\.|logit_(scale|bias)$)/,
		reason: "it belongs to SigLIP's tower of text, and the model has a language model of its own",
		module: true,
	},
	{
		name: /^(sound_encoder|sound_projection|audio_tower|embed_audio)\./,
		reason: "it belongs to a sound encoder, which is not trained",
		module: true,
	},
	{
		name: /^mtp\.(fc|norm|pre_fc_norm_\w+|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn|mlp))\./,
		...ahead,
	},
	{
		name: /(^|\.)layers\.\d+\.embed_tokens\.weight$/,
		reason: "it repeats the embedding",
		repeats: (name) => name.replace(/layers\.\d+\.embed_tokens/, "embed_tokens"),
	},
	{
		name: /(^|\.)model\.layers\.\d+\.shared_head\.head\.weight$/,
		reason: "it repeats the output layer",
		repeats: (name) => name.replace(/model\.layers\.\d+\.shared_head\.head/, "lm_head"),
	},
];
/** A value as bf16 may be this far from it, relatively. */
const ROUNDING = 2 ** -8;

const entryOf = (name: string) => table.find((entry) => entry.name.test(name));

/** Whether a tensor is one that may be left out. */
export function isLeftOut(name: string): boolean {
	return entryOf(name) !== undefined;
}

/** Whether a folder that is written later gets one that is left out back; `beside`: from a checkpoint of another format. */
export function isKept(name: string, { beside }: { readonly beside: boolean }): boolean {
	const { repeats, module } = entryOf(name) ?? ahead;
	return repeats === undefined && !(beside && module === true);
}

/**
 * A sentence for each kind of the tensors that are left out, apart for those of modules, which are lost; values that would change the
 * model are an error. `tower`: the tower's part of config.json.
 */
export function describeLeftOut(
	store: TensorStore,
	leftOut: readonly string[],
	tower: Readonly<Record<string, unknown>>,
): { readonly notices: string[]; readonly warnings: string[] } {
	const kinds = [...Map.groupBy(leftOut, (name) => entryOf(name) ?? ahead)];
	const sentences = (isModule: boolean) =>
		kinds
			.filter(([{ module = false }]) => module === isModule)
			.map(([entry, names]) => sentenceOf(entry, names, store, tower));
	return { notices: sentences(false), warnings: sentences(true) };
}

function sentenceOf(
	entry: Omit<LeftOut, "name">,
	names: readonly string[],
	store: TensorStore,
	tower: Readonly<Record<string, unknown>>,
): string {
	const [first, ...more] = names as [string, ...string[]];
	if (entry.values) {
		const [key, otherwise] = entry.values;
		const said = tower[key];
		const values = Array.isArray(said) ? said.map(Number) : otherwise;
		for (const name of [first, ...more]) requireValues(store, name, values);
	}
	if (entry.repeats) for (const name of [first, ...more]) requireEqual(store, name, entry.repeats(name));
	const others = more.length === 0 ? "" : ` (as are ${more.length} more)`;
	return `${store.path}: ${first} is left out${others}: ${entry.reason}.`;
}

function requireEqual(store: TensorStore, name: string, other: string): void {
	const same = (a: TensorType | undefined, b: TensorType) => a?.dtype === b.dtype && a.shape.join() === b.shape.join();
	let equal = same(store.tensors.get(other), typeOf(store, name));
	if (equal) {
		const others = readPieces(store, other);
		for (const piece of readPieces(store, name)) equal &&= Buffer.compare(piece, others.next().value!) === 0;
	}
	if (!equal) throw new UserError(`${store.path}: ${name} is not ${other}, and a model here has one tensor for both.`);
}

function requireValues(store: TensorStore, name: string, expected: readonly number[]): void {
	const { dtype, shape } = typeOf(store, name);
	const size = shape.reduce((product, n) => product * n, 1);
	if (size !== expected.length || !isFloatDtype(dtype)) {
		throw new UserError(`${store.path}: ${name} is [${shape}] ${dtype}, not a number a channel.`);
	}
	const read = readTensor(store, name);
	const bytes = new Uint8Array(read.buffer as ArrayBuffer, read.byteOffset, read.byteLength);
	const found = Array.from(decodeFloats(dtype, bytes));
	if (found.every((value, i) => Math.abs(value - expected[i]!) <= ROUNDING * expected[i]!)) return;
	throw new UserError(
		`${store.path}: ${name} is [${found.join(", ")}], and images are normalised by [${expected.join(", ")}]: its tower would see other values than it was trained on.`,
	);
}
