/**
 * Other numbers of the layers in names (docs/spec/checkpoint.md §5.1): a bracket group's layers under one number, or the attention
 * and the MLP of a GPT model's layer. A rename applies to a parameter and to its optimizer state alike.
 */

import {
	countLayers,
	type HybridPattern,
	type LayerKind,
	PatternError,
	parsePattern,
	symbolsOf,
} from "../../config/hybrid-pattern.ts";
import { kinds } from "../../models/language/kinds/index.ts";
import { UserError } from "../../system/errors.ts";
import { type Correspondence, CorrespondenceBuilder } from "../mapping.ts";
import type { TensorStore } from "../store.ts";

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
 * Numbers layers as a GPT model does: the n-th `*` and the n-th `-` or `E` are layer n, wherever they stand; `M` has no place in
 * one.
 */
export function layersOfGpt(pattern: string, path: string): NumberedLayer[] {
	const { segments, mtp } = parseAt(pattern, path);
	const refuse = (reason: string): never => {
		throw new UserError(`${path}: pattern "${pattern}" is of no GPT model: ${reason}.`);
	};
	if (mtp !== null) refuse("multi-token prediction has no place in one");
	const layers = segments.flat(2);
	const [attention, dense, experts] = (["attention", "mlp", "moe"] as const).map((kind) =>
		countLayers(layers, kind),
	) as [number, number, number];
	if (dense > 0 && experts > 0) refuse("it has both - and E, and all layers of a GPT model are of one kind");
	if (attention === 0 || attention !== dense + experts) {
		refuse(
			`it has ${attention} * and ${dense + experts} ${experts > 0 ? "E" : "-"}, and a layer of a GPT model has both`,
		);
	}
	let [attentions, others] = [0, 0];
	return layers.map((kind) => {
		if (kind === "mamba") return { kind, number: null };
		return { kind, number: kind === "attention" ? attentions++ : others++ };
	});
}

/** The pattern that `path` tells of. */
function parseAt(pattern: string, path: string): HybridPattern {
	try {
		return parsePattern(pattern);
	} catch (error) {
		throw error instanceof PatternError ? new UserError(`${path}: ${error.message}`) : error;
	}
}

/** What a layer is told by from others of its number. */
const scopeOf = (kind: LayerKind) => kinds[kind].scopes[0]!;

const layerName = /^((?:optimizer\.state\.[^.]+\.)?language_model\.decoder\.)layers\.(\d+)\.(.*)$/;
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
	{ layernorm, pattern, path }: { readonly layernorm: boolean; readonly pattern: string; readonly path: string },
): Correspondence {
	const rename = (name: string): string => {
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
