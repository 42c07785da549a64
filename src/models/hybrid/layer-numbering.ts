/** Places of the language model's layers: their numbers, symbols and names. */
import type { LayerSymbol } from "../../config/hybrid-pattern.ts";
import type { HybridConfig } from "./config.ts";
import type { Segment } from "./segments.ts";

/** Prefix of the language model in every name. */
export const languageModelPrefix = "language_model.";

export interface LayerPlace {
	/** Layers of the main part are numbered from 0; those of the prediction depths follow, depth after depth. */
	readonly index: number;
	readonly symbol: LayerSymbol;
	/** Begin of the names of its parameters. */
	readonly prefix: string;
}

/** Prefix of layer `index` (global, from 0) of the main part. */
export function layerPrefix(index: number): string {
	return `${languageModelPrefix}decoder.layers.${index}.`;
}

/** Prefix of the parameters of a prediction depth, from 0, that belong to none of its layers. */
export function mtpPrefix(depth: number): string {
	return `${languageModelPrefix}mtp.layers.${depth}.`;
}

/** Layer `index` of the main part. */
export function mainLayer({ pattern }: HybridConfig, index: number): LayerPlace {
	return { index, symbol: pattern[index]!, prefix: layerPrefix(index) };
}

/** Prediction depths that have parameters of their own. */
export function storedDepths({ prediction }: HybridConfig): number {
	if (prediction === null) return 0;
	return prediction.repeated ? 1 : prediction.depths;
}

/** The layers of a stored prediction depth. */
export function mtpLayers({ pattern, prediction }: HybridConfig, depth: number): LayerPlace[] {
	const layers = prediction!.pattern;
	return layers.map((symbol, at) => ({
		index: pattern.length + depth * layers.length + at,
		symbol,
		prefix: `${mtpPrefix(depth)}mtp_model_layer.layers.${at}.`,
	}));
}

/** The layers of a segment; behind the head, those of the prediction depths too. */
export function layersOfSegment(config: HybridConfig, { begin, end, hasHead }: Segment): LayerPlace[] {
	const main = Array.from({ length: end - begin }, (_, at) => mainLayer(config, begin + at));
	const depths = hasHead ? Array.from({ length: storedDepths(config) }, (_, depth) => depth) : [];
	return [...main, ...depths.flatMap((depth) => mtpLayers(config, depth))];
}

/** Every layer of the model in the order of their numbers. */
export function allLayers(config: HybridConfig): LayerPlace[] {
	return layersOfSegment(config, { begin: 0, end: config.pattern.length, embeds: true, hasHead: true });
}
