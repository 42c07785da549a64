/**
 * Other layouts of logical tensors (docs/spec/checkpoint.md §5): layers numbered by bracket group or as a GPT model's, experts of a layer
 * in one tensor, gated rows interleaved. A layout applies to a parameter and to its optimizer state alike.
 */

import {
	countLayers,
	type HybridPattern,
	hasLayer,
	type LayerKind,
	PatternError,
	parsePattern,
	symbolsOf,
} from "../../config/hybrid-pattern.ts";
import { kinds } from "../../models/language/kinds/index.ts";
import { UserError } from "../../system/errors.ts";
import { elementCount } from "../dtype.ts";
import { type Correspondence, CorrespondenceBuilder, MappedStore, planTensors } from "../mapping.ts";
import { canonicalLayout, type NativeLayout } from "../native/manifest.ts";
import type { TensorStore } from "../store.ts";
import type { JsonObject } from "../torch-dist/common.ts";

/** physical: every layer by its own number; logical: by its block's; gpt: by its place among those of its kind. */
export const layerNameKinds = ["physical", "logical", "gpt"] as const;
export type LayerNames = (typeof layerNameKinds)[number];

/** A layer of a pattern's main part, and its number in the other names; null: it has no place there. */
export interface NumberedLayer {
	readonly kind: LayerKind;
	readonly number: number | null;
}

/**
 * Numbers layers by block, so that a bracket group's layers share a number. Names of layers in a block differ by their scope, so a
 * block has one layer of each. `path` is for errors.
 */
export function layersByBlock(pattern: string, path: string): NumberedLayer[] {
	const blocks = parseAt(pattern, path).segments.flat();
	for (const block of blocks) {
		if (new Set(block.map(scopeOf)).size < block.length) {
			throw new UserError(`${path}: group [${symbolsOf(block)}] of pattern "${pattern}" has two layers of a kind.`);
		}
	}
	return blocks.flatMap((block, number) => block.map((kind) => ({ kind, number })));
}

/**
 * Numbers layers as a GPT model does: the n-th `*` or `+` and the n-th `-` or `E` are layer n, wherever they stand; `M` has no place in
 * one. A depth of multi-token prediction is one layer.
 */
export function layersOfGpt(pattern: string, path: string): NumberedLayer[] {
	const { segments, mtp } = parseAt(pattern, path);
	const refuse = (reason: string): never => {
		throw new UserError(`${path}: pattern "${pattern}" is of no GPT model: ${reason}.`);
	};
	const depth = mtp === null ? null : symbolsOf(mtp.layers.flat());
	if (depth !== null && !/^[*+][-E]$/.test(depth)) {
		refuse(
			`its multi-token prediction has the layers ${depth}, and a layer of a GPT model is *- or *E, or + in the place of *`,
		);
	}
	const layers = segments.flat(2);
	const mixers = layers.filter(mixesTokens);
	const [dense, experts] = [countLayers(layers, "mlp"), countLayers(layers, "moe")];
	const latent = mixers.includes("latentAttention");
	if (latent && mixers.some((kind) => kind !== "latentAttention")) {
		refuse("it has + beside other attention, and the layers of a GPT model are alike");
	}
	if (mixers.length === 0 || mixers.length !== dense + experts) {
		const symbols = latent ? "+" : hasLayer(pattern, "gdn") ? "* or G" : "*";
		refuse(
			`it has ${mixers.length} ${symbols} and ${dense + experts} ${experts === 0 ? "-" : dense === 0 ? "E" : "- or E"}, and a layer of a GPT model has both`,
		);
	}
	let [attentions, others] = [0, 0];
	return layers.map((kind) => {
		if (kind === "mamba") return { kind, number: null };
		return { kind, number: mixesTokens(kind) ? attentions++ : others++ };
	});
}

/** Whether a layer of a GPT model begins with this kind. */
export const mixesTokens = (kind: LayerKind) => ["attention", "latentAttention", "gdn"].includes(kind);

/** The pattern that `path` tells of. */
function parseAt(pattern: string, path: string): HybridPattern {
	try {
		return parsePattern(pattern);
	} catch (error) {
		throw error instanceof PatternError ? new UserError(`${path}: ${error.message}`) : error;
	}
}

/** The mark that tells a layer from others of its number. */
const scopeOf = (kind: LayerKind) => kinds[kind].scopes[0]!;

const layerName = /^((?:optimizer\.state\.[^.]+\.)?language_model\.decoder\.)layers\.(\d+)\.(.*)$/;
const depthName =
	/^((?:optimizer\.state\.[^.]+\.)?language_model\.mtp\.layers\.\d+\.)(?:mtp_model|transformer)_layer\.(layers\.\d+\.)?(.*)$/;
const finalNorm = /^((?:optimizer\.state\.[^.]+\.)?language_model\.decoder\.)final_(norm|layernorm)\./;

/** Number of the layer of the language model's main part that a name belongs to; null: to none. */
export function layerOf(name: string): number | null {
	const layer = layerName.exec(name);
	return layer ? Number(layer[2]) : null;
}

/**
 * Own ("physical") names of layers, the logical side, and those with other numbers, the foreign one. `to` is how names shall be;
 * the store has the other kind. `layernorm`: the final norm is called final_layernorm there.
 */
export function renamedLayers(
	store: TensorStore,
	layers: readonly NumberedLayer[],
	to: "physical" | "other",
	{
		layernorm,
		depthIsLayer = false,
		pattern,
		path,
	}: {
		readonly layernorm: boolean;
		/** A depth of multi-token prediction is to be one layer, of attention and an MLP. */
		readonly depthIsLayer?: boolean;
		readonly pattern: string;
		readonly path: string;
	},
): Correspondence {
	const rename = (name: string): string => {
		const depth = depthName.exec(name);
		if (depth && to === "other" && depthIsLayer) return `${depth[1]}mtp_model_layer.${depth[3]}`;
		if (depth && to === "physical" && depth[2] === undefined) {
			const place = kinds.attention.scopes.includes(depth[3]!.split(".")[0]!) ? 0 : 1;
			return `${depth[1]}mtp_model_layer.layers.${place}.${depth[3]}`;
		}
		const layer = layerName.exec(name);
		if (!layer) return layernorm ? name.replace(finalNorm, `$1final_${to === "other" ? "layernorm" : "norm"}.`) : name;
		const index = Number(layer[2]);
		const rest = layer[3]!;
		const physical =
			to === "other"
				? index
				: layers.findIndex(({ kind, number }) => number === index && kinds[kind].scopes.includes(rest.split(".")[0]!));
		const known = layers[physical];
		if (!known || known.number === null) {
			throw new UserError(`${path}: ${name} belongs to no layer of pattern "${pattern}".`);
		}
		return `${layer[1]}layers.${to === "other" ? known.number : physical}.${rest}`;
	};
	const builder = new CorrespondenceBuilder(path);
	for (const [name, { shape }] of store.tensors) {
		const renamed = rename(name);
		const [logical, foreign] = to === "other" ? [name, renamed] : [renamed, name];
		if (builder.logical.has(logical) || builder.foreign.has(foreign)) {
			throw new UserError(`${path}: two tensors would be named ${renamed}.`);
		}
		builder.same(logical, foreign, shape);
	}
	return builder;
}

/** A layout, and over how many expert-parallel tensor ranks gated rows were interleaved. */
export interface StoredLayout extends NativeLayout {
	readonly gluTensorParallel: number;
}

/** The layout of gated rows by Megatron's arguments; `path` is for errors. */
export function layoutOfArguments(args: JsonObject, path: string): StoredLayout {
	const size = (name: string) => {
		const value = args[name] ?? 0;
		if (!Number.isSafeInteger(value) || (value as number) < 0) {
			throw new UserError(`${path}: the argument ${name} is ${JSON.stringify(value)}, no number of rows or ranks.`);
		}
		return value as number;
	};
	return {
		...canonicalLayout,
		glu: {
			experts: size("moe_mlp_glu_interleave_size"),
			sharedExperts: size("moe_shared_expert_glu_interleave_size"),
		},
		gluTensorParallel: size("expert_tensor_parallel_size") || 1,
	};
}

/** Canonical tensors of a store in this layout. */
export function fromLayout(store: TensorStore, layout: StoredLayout, path: string): TensorStore {
	let result = store;
	const step = (correspondence: Correspondence | null) => {
		if (correspondence) result = new MappedStore(result, planTensors(result, correspondence, "logical"));
	};
	if (layout.experts === "grouped") step(splitExperts(result));
	step(interleaved(result, layout));
	if (layout.layerNames === "logical") step(renamedBlocks(result, layout.pattern, "physical", path));
	return result;
}

/** Canonical tensors in another layout. */
export function toLayout(store: TensorStore, layout: StoredLayout, path: string): TensorStore {
	let result = store;
	const step = (correspondence: Correspondence | null) => {
		if (correspondence) result = new MappedStore(result, planTensors(result, correspondence, "foreign"));
	};
	if (layout.layerNames === "logical") step(renamedBlocks(result, layout.pattern, "other", path));
	step(interleaved(result, layout));
	if (layout.experts === "grouped") step(groupExperts(result, path));
	return result;
}

function renamedBlocks(
	store: TensorStore,
	pattern: string | null,
	to: "physical" | "other",
	path: string,
): Correspondence {
	if (pattern === null) {
		throw new UserError(`${path}: the layers' groups are unknown; name them with --hybrid-layer-pattern.`);
	}
	const layernorm = pattern.includes("[");
	return renamedLayers(store, layersByBlock(pattern, path), to, { layernorm, pattern, path });
}

const indexed = /^(.*\bmlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$/;
const grouped = /^(.*\bmlp\.experts\.linear_fc[12]\.(?:weight|bias))$/;

function groupExperts(store: TensorStore, path: string): Correspondence {
	const builder = new CorrespondenceBuilder(path);
	const groups = new Map<string, Map<number, string>>();
	for (const [name, { shape }] of store.tensors) {
		const expert = indexed.exec(name);
		if (!expert) builder.same(name, name, shape);
		else {
			const members = groups.get(expert[1]!) ?? new Map<number, string>();
			members.set(Number(expert[2]), name);
			groups.set(expert[1]!, members);
		}
	}
	for (const [key, members] of groups) {
		if (store.tensors.has(key)) throw new UserError(`${path} has ${key} and its experts one by one.`);
		requireEveryExpert(store, key, members, path);
		const { shape } = store.tensors.get(members.get(0)!)!;
		linkExperts(builder, key, members.size, shape, (i) => members.get(i)!);
	}
	return builder;
}

/** Throws a UserError with every expert that is missing before the last one, or is no other's size. */
function requireEveryExpert(
	{ tensors }: TensorStore,
	key: string,
	members: ReadonlyMap<number, string>,
	path: string,
): void {
	const places = Array.from({ length: Math.max(...members.keys()) + 1 }, (_, i) => i);
	const missing = places.filter((i) => !members.has(i));
	if (missing.length > 0) {
		throw new UserError(
			`${path}: ${missing.map((i) => key + String(i)).join(", ")} of ${places.length} experts are missing.`,
		);
	}
	const first = tensors.get(members.get(0)!)!.shape;
	const others = [...members.values()].filter((name) => tensors.get(name)!.shape.join() !== first.join());
	if (others.length > 0) {
		throw new UserError(`${path}: ${others.join(", ")} have another shape than ${key}0, [${first.join(", ")}].`);
	}
}

function splitExperts(store: TensorStore): Correspondence {
	const builder = new CorrespondenceBuilder(store.path);
	for (const [name, { shape }] of store.tensors) {
		if (!grouped.test(name)) builder.same(name, name, shape);
		else linkExperts(builder, name, shape[0] ?? 0, shape.slice(1), (i) => name + String(i));
	}
	return builder;
}

function linkExperts(
	builder: CorrespondenceBuilder,
	key: string,
	count: number,
	shape: readonly number[],
	nameOf: (expert: number) => string,
): void {
	const length = elementCount(shape)!;
	builder.addForeign(key, [count, ...shape]);
	for (let i = 0; i < count; i++) {
		const logical = nameOf(i);
		builder.addLogical(logical, shape);
		builder.link({ logical, foreign: key, foreignRuns: { offset: i * length, stride: length }, count: 1, length });
	}
}

/** Contiguous gate and linear halves ↔ blocks of both in turn; null if nothing is interleaved. */
function interleaved(store: TensorStore, { glu, gluTensorParallel }: StoredLayout): Correspondence | null {
	if (glu.experts === 0 && glu.sharedExperts === 0) return null;
	const builder = new CorrespondenceBuilder(store.path);
	for (const [name, { shape }] of store.tensors) {
		const fc1 = /^(.*\bmlp\.(shared_experts|experts)\.linear_)fc1\.(weight|bias)(\d*)$/.exec(name);
		const width = fc1 ? store.tensors.get(`${fc1[1]}fc2.weight${fc1[4]}`)?.shape[1] : undefined;
		const block = fc1?.[2] === "experts" ? glu.experts : glu.sharedExperts;
		if (!fc1 || block === 0 || width === undefined || shape[0] !== 2 * width) builder.same(name, name, shape);
		else linkInterleaved(builder, name, shape, width, block, fc1[2] === "experts" ? gluTensorParallel : 1);
	}
	return builder;
}

/**
 * docs/spec/checkpoint.md §5.3: per rank blocks of gate and linear rows in turn; the whole holds the ranks' first
 * halves, then the second.
 */
function linkInterleaved(
	builder: CorrespondenceBuilder,
	name: string,
	shape: readonly number[],
	width: number,
	block: number,
	ranks: number,
): void {
	const local = width / ranks;
	if (!Number.isInteger(local) || local % block !== 0) {
		throw new UserError(
			`${builder.path}: ${name} has ${width} gated rows, which do not divide into ${ranks} × blocks of ${block}.`,
		);
	}
	const elements = elementCount(shape.slice(1))!;
	builder.addLogical(name, shape);
	builder.addForeign(name, shape);
	for (let rank = 0; rank < ranks; rank++) {
		for (let row = 0; row < 2 * local; row += block) {
			// The run's place in the rank's interleaved tensor, and the rows it holds.
			const part = (row / block) % 2;
			const inside = Math.floor(row / (2 * block)) * block;
			// The stored halves are cut in the middle of the rank's rows; a block may straddle the cut.
			for (let at = row; at < row + block; ) {
				const half = Math.floor(at / local);
				const rows = Math.min(row + block, (half + 1) * local) - at;
				builder.rows({
					logical: name,
					foreign: name,
					width: elements,
					rows,
					logicalRow: part * width + rank * local + inside + (at - row),
					foreignRow: half * width + rank * local + (at - half * local),
				});
				at += rows;
			}
		}
	}
}
