/**
 * Selections of units that make a submodel's tensors (docs/spec/elastic.md §16): a submodel keeps the first units of each axis, a
 * permutation keeps all in another order.
 */

import {
	affineName,
	type LanguageModelConfiguration,
	projectorPrefix,
	type Selection,
	type TensorStore,
} from "../../../checkpoint/index.ts";
import { hasGatedActivation } from "../../../config/derive.ts";
import { type LayerKind, parsePattern } from "../../../config/hybrid-pattern.ts";
import { modelOfLayer } from "../../../config/per-layer.ts";
import { UserError } from "../../../system/errors.ts";

/** Places of kept units among the stored ones, in their new order; null: all in order. */
export type Places = Uint32Array | null;

/** Units of one layer; of the axes that its kind does not have, null. */
export interface LayerUnits {
	/** Heads of a Mamba-2 layer, group by group, equally many of each. */
	readonly mambaHeads: Places;
	/** Query heads of an attention layer, query group by query group, equally many of each. */
	readonly queryHeads: Places;
	readonly experts: Places;
	/** Channels of a stored expert by its number. */
	readonly channels: (expert: number) => Places;
}

export interface KeptUnits {
	/** Embedding channels. */
	readonly hidden: Places;
	/** By layer of the main part; null: the layer is left out. Layers behind are numbered anew. */
	readonly layers: readonly (LayerUnits | null)[];
}

export const wholeLayer: LayerUnits = { mambaHeads: null, queryHeads: null, experts: null, channels: () => null };

/** Places of blocks of `size` that follow each other: head h is [h · size, (h + 1) · size). */
function blocksAt(blocks: Uint32Array, size: number): Uint32Array {
	const places = new Uint32Array(blocks.length * size);
	for (const [at, block] of blocks.entries()) {
		for (let i = 0; i < size; i++) places[at * size + i] = block * size + i;
	}
	return places;
}

/** [0, count). */
export function firstPlaces(count: number): Uint32Array {
	return Uint32Array.from({ length: count }, (_, place) => place);
}

/** The first `kept` / `groups` of each of `groups` equal groups of `total`. */
export function firstOfGroups(total: number, groups: number, kept: number): Places {
	if (kept === total) return null;
	const [size, first] = [total / groups, kept / groups];
	return Uint32Array.from({ length: kept }, (_, at) => Math.floor(at / first) * size + (at % first));
}

function join(...parts: readonly (readonly [offset: number, places: Uint32Array])[]): Uint32Array {
	const joined = new Uint32Array(parts.reduce((sum, [, places]) => sum + places.length, 0));
	let at = 0;
	for (const [offset, places] of parts) {
		for (const place of places) joined[at++] = offset + place;
	}
	return joined;
}

type Rows = Places;
/** Rows and columns of a layer's tensor, by the end of its name; undefined: the layer has no such tensor. */
type LayerTensors = ReadonlyMap<string, readonly [rows: Rows, columns: Places]>;

/**
 * The selection that makes every model tensor of a submodel out of `store`, by the tensor's new name; tensors that are left out
 * have no selection. Optimizer state has to be selected by the caller. Throws a UserError for a tensor that the model has no
 * place for.
 */
export function selectionsOf(
	store: Pick<TensorStore, "path" | "tensors">,
	configuration: LanguageModelConfiguration,
	kept: KeptUnits,
): Map<string, Selection> {
	const { hidden } = kept;
	const { mtp } = parsePattern(configuration.hybridLayerPattern);
	const pattern = parsePattern(configuration.hybridLayerPattern).segments.flat(2);
	const tables = pattern.map((symbol, index) => {
		const units = kept.layers[index];
		return units ? tensorsOfLayer(symbol, modelOfLayer(configuration, index), units, hidden) : null;
	});
	const ahead = mtp?.layers.map((symbol) => tensorsOfLayer(symbol, configuration, wholeLayer, hidden)) ?? [];
	const numbers = newNumbers(kept.layers);
	const selections = new Map<string, Selection>();
	for (const name of store.tensors.keys()) {
		const layer = /^language_model\.decoder\.layers\.(\d+)\.(.+)$/.exec(name);
		const depth = /^language_model\.mtp\.layers\.\d+\.mtp_model_layer\.layers\.(\d+)\.(.+)$/.exec(name);
		if (layer) {
			const index = Number(layer[1]);
			const table = tables[index];
			if (table === null) continue;
			const prefix = `language_model.decoder.layers.${numbers[index]}.`;
			addOfLayer(selections, store, name, layer[2]!, table, kept.layers[index] ?? wholeLayer, prefix);
		} else if (depth) {
			const prefix = name.slice(0, -depth[2]!.length);
			addOfLayer(selections, store, name, depth[2]!, ahead[Number(depth[1])], wholeLayer, prefix);
		} else {
			const [rows, columns] = outsideLayers(name, hidden, configuration.hiddenSize, store.path);
			selections.set(name, { source: name, rows, columns });
		}
	}
	return selections;
}

/** Numbers of the layers that stay; those that are left out have that of the next. */
function newNumbers(layers: KeptUnits["layers"]): number[] {
	let next = 0;
	return layers.map((units) => (units === null ? next : next++));
}

/** `end`: of the name, behind the layer's number. */
function addOfLayer(
	selections: Map<string, Selection>,
	{ path }: Pick<TensorStore, "path">,
	source: string,
	end: string,
	table: LayerTensors | undefined,
	units: LayerUnits,
	prefix: string,
): void {
	const expert = /^(mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$/.exec(end);
	if (expert) {
		const number = Number(expert[2]);
		const at = units.experts === null ? number : units.experts.indexOf(number);
		if (at < 0) return;
		end = `${expert[1]}${at}`;
	}
	const places = table?.get(expert ? expert[0] : end);
	if (places === undefined) throw new UserError(`${path}: ${source} has no place in the model's layer pattern.`);
	selections.set(prefix + end, { source, rows: places[0], columns: places[1] });
}

/** Tensors of no layer. */
function outsideLayers(name: string, hidden: Places, width: number, path: string): readonly [Rows, Places] {
	if (name.startsWith("modality_submodules.")) {
		// The projector's output is added to the embedding.
		const gives = name === affineName || name === `${projectorPrefix}linear_fc2.weight`;
		return [gives ? hidden : null, null];
	}
	const own = name.replace(/^language_model\./, "");
	if (/^(embedding\.word_embeddings|output_layer)\.weight$/.test(own)) return [null, hidden];
	if (own === "decoder.final_norm.weight") return [hidden, null];
	if (/^mtp\.layers\.\d+\.(enorm|hnorm|final_layernorm)\.weight$/.test(own)) return [hidden, null];
	if (/^mtp\.layers\.\d+\.eh_proj\.weight$/.test(own)) {
		return [hidden, hidden && join([0, hidden], [width, hidden])];
	}
	if (name.startsWith("elastic_router.")) return [null, null];
	throw new UserError(`${path}: it is not known which channels of the embedding ${name} reads or writes.`);
}

function tensorsOfLayer(
	kind: LayerKind,
	c: LanguageModelConfiguration,
	units: LayerUnits,
	hidden: Places,
): LayerTensors {
	switch (kind) {
		case "mamba":
			return mambaTensors(c, units.mambaHeads, hidden);
		case "attention":
			return attentionTensors(c, units.queryHeads, hidden);
		case "mlp":
			return new Map([
				["mlp.linear_fc1.layer_norm_weight", [hidden, null]],
				["mlp.linear_fc1.weight", [null, hidden]],
				["mlp.linear_fc1.bias", [null, null]],
				["mlp.linear_fc2.weight", [hidden, null]],
				["mlp.linear_fc2.bias", [hidden, null]],
			]);
		default:
			return expertTensors(c, units, hidden);
	}
}

function mambaTensors(c: LanguageModelConfiguration, heads: Places, hidden: Places): LayerTensors {
	const all = firstPlaces(c.mambaNumHeads);
	const inner = c.mambaNumHeads * c.mambaHeadDim;
	const state = firstPlaces(2 * c.mambaNumGroups * c.mambaStateDim);
	const channels = heads && blocksAt(heads, c.mambaHeadDim);
	const kept = channels ?? blocksAt(all, c.mambaHeadDim);
	const convolved = heads && join([0, kept], [inner, state]);
	const projected = heads && join([0, kept], [inner, kept], [2 * inner, state], [2 * inner + state.length, heads]);
	return new Map([
		["mixer.in_proj.layer_norm_weight", [hidden, null]],
		["mixer.in_proj.weight", [projected, hidden]],
		["mixer.conv1d_weight", [convolved, null]],
		["mixer.conv1d_bias", [convolved, null]],
		["mixer.A_log", [heads, null]],
		["mixer.D", [heads, null]],
		["mixer.dt_bias", [heads, null]],
		["mixer.norm.weight", [channels, null]],
		["mixer.out_proj.weight", [hidden, channels]],
	]);
}

/** Rows of linear_qkv: per query group its query heads, a key head, a value head (docs/spec/checkpoint.md §4.2). */
function attentionTensors(c: LanguageModelConfiguration, heads: Places, hidden: Places): LayerTensors {
	const { numAttentionHeads: all, numQueryGroups: groups, kvChannels: d } = c;
	const perGroup = all / groups;
	const stored = Array.from({ length: groups }, (_, group) => {
		const own = [...(heads ?? [])].filter((head) => Math.floor(head / perGroup) === group);
		const first = group * (perGroup + 2);
		return [...own.map((head) => first + (head % perGroup)), first + perGroup, first + perGroup + 1];
	});
	const rows = heads && blocksAt(Uint32Array.from(stored.flat()), d);
	return new Map([
		["self_attention.linear_qkv.layer_norm_weight", [hidden, null]],
		["self_attention.linear_qkv.weight", [rows, hidden]],
		["self_attention.linear_qkv.bias", [rows, null]],
		["self_attention.linear_proj.bias", [hidden, null]],
		["self_attention.linear_proj.weight", [hidden, heads && blocksAt(heads, d)]],
	]);
}

function expertTensors(c: LanguageModelConfiguration, units: LayerUnits, hidden: Places): LayerTensors {
	const { numExperts, moeFfnHiddenSize: f } = c;
	const gated = hasGatedActivation(c);
	const table = new Map<string, readonly [Rows, Places]>([
		["pre_mlp_layernorm.weight", [hidden, null]],
		["mlp.router.weight", [units.experts, hidden]],
		["mlp.router.bias", [units.experts, null]],
		["mlp.router.expert_bias", [units.experts, null]],
		["mlp.shared_experts.linear_fc1.weight", [null, hidden]],
		["mlp.shared_experts.linear_fc2.weight", [hidden, null]],
	]);
	const both = new Map<Places, Places>();
	for (let expert = 0; expert < numExperts; expert++) {
		const channels = units.channels(expert);
		// Experts that keep the same channels share the list.
		if (!both.has(channels)) both.set(channels, channels && gated ? join([0, channels], [f, channels]) : channels);
		table.set(`mlp.experts.linear_fc1.weight${expert}`, [both.get(channels)!, hidden]);
		table.set(`mlp.experts.linear_fc1.bias${expert}`, [both.get(channels)!, null]);
		table.set(`mlp.experts.linear_fc2.weight${expert}`, [hidden, channels]);
		table.set(`mlp.experts.linear_fc2.bias${expert}`, [hidden, null]);
	}
	return table;
}
