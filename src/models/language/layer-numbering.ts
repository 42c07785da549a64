/** Indices, kinds and parameter name prefixes of the language model's layers. */
import type { LayerKind } from "../../config/hybrid-pattern.ts";
import type { HybridConfig } from "./config.ts";
import type { PipelineSegment } from "./pipeline-segments.ts";

/** Prefix of every parameter of the language model. */
export const languageModelPrefix = "language_model.";

export interface LayerPlace {
	/** Layers of the main part are numbered from 0; those of the MTP depths follow, depth after depth. */
	readonly index: number;
	readonly kind: LayerKind;
	/** Prefix of its parameters' names. */
	readonly prefix: string;
}

/** Name prefix of layer `index` (global, from 0) of the main part. */
export function layerPrefix(index: number): string {
	return `${languageModelPrefix}decoder.layers.${index}.`;
}

/** Name prefix of the parameters of an MTP depth, from 0, that belong to none of its layers. */
export function mtpPrefix(depth: number): string {
	return `${languageModelPrefix}mtp.layers.${depth}.`;
}

/** Layer `index` of the main part. */
export function mainLayer({ pattern }: HybridConfig, index: number): LayerPlace {
	return { index, kind: pattern[index]!, prefix: layerPrefix(index) };
}

/** Number of MTP depths with parameters of their own. */
export function storedDepths({ mtp }: HybridConfig): number {
	if (mtp === null) return 0;
	return mtp.repeated ? 1 : mtp.depths;
}

/** The layers of an MTP depth with parameters. */
export function mtpLayers({ pattern, mtp }: HybridConfig, depth: number): LayerPlace[] {
	const layers = mtp!.pattern;
	return layers.map((kind, at) => ({
		index: pattern.length + depth * layers.length + at,
		kind,
		prefix: `${mtpPrefix(depth)}mtp_model_layer.layers.${at}.`,
	}));
}

/** The layers of a segment; with the output layer also those of the MTP depths. */
export function layersOfSegment(config: HybridConfig, { begin, end, hasHead }: PipelineSegment): LayerPlace[] {
	const main = Array.from({ length: end - begin }, (_, at) => mainLayer(config, begin + at));
	const depths = hasHead ? Array.from({ length: storedDepths(config) }, (_, depth) => depth) : [];
	return [...main, ...depths.flatMap((depth) => mtpLayers(config, depth))];
}

/** All layers of the model by ascending index. */
export function allLayers(config: HybridConfig): LayerPlace[] {
	return layersOfSegment(config, { begin: 0, end: config.pattern.length, embeds: true, hasHead: true });
}
