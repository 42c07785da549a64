/** The parameters of the hybrid language model: Megatron's logical names, shapes, initial values and sharding. */
import { withAdapters } from "../lora.ts";
import type { ParameterSpec } from "../parameter-spec.ts";
import { configOfLayer, type HybridConfig } from "./config.ts";
import { kinds } from "./kinds/index.ts";
import { distributions, hiddenNorm, replicated, rows } from "./kinds/kind.ts";
import { languageModelPrefix, layersOfSegment, mtpPrefix, storedDepths } from "./layer-numbering.ts";
import { type PipelineSegment, wholeModel } from "./pipeline-segments.ts";

/** Name of the word embedding, which is the output layer too if tied. */
export const wordEmbedding = `${languageModelPrefix}embedding.word_embeddings.weight`;

/** Name of the table of learned positions. */
export const positionEmbedding = `${languageModelPrefix}embedding.position_embeddings.weight`;

/**
 * Whether the end of the model reads the word embedding again, as a tied output layer or in MTP depths. On another stage than the
 * embedding it reads a copy, and the gradients of both are summed.
 */
export function rereadsEmbedding({ tieWordEmbeddings, mtp }: HybridConfig): boolean {
	return tieWordEmbeddings || mtp !== null;
}

/** The parameters of the given segments in forward order. */
export function hybridParameters(
	config: HybridConfig,
	segments: readonly PipelineSegment[] = [wholeModel(config.pattern.length)],
): ParameterSpec[] {
	const {
		initMethodStd: std,
		hiddenSize: h,
		paddedVocabularySize: v,
		tieWordEmbeddings: tied,
		learnedPositions,
	} = config;
	const vocabulary = (name: string, standardDeviation: number): ParameterSpec => ({
		name,
		shape: [v, h],
		initialisation: { kind: "normal", standardDeviation },
		shard: rows,
		liveRows: config.vocabularySize,
	});
	const embeds = segments.some((segment) => segment.embeds);
	const hasHead = segments.some((segment) => segment.hasHead);
	const copied = rereadsEmbedding(config) && embeds !== hasHead;
	const embeddingTable: ParameterSpec = {
		...vocabulary(wordEmbedding, config.embeddingInitMethodStd),
		...(copied && { copy: { counted: embeds } }),
	};
	const specs: ParameterSpec[] = embeds ? [embeddingTable] : [];
	if (embeds && learnedPositions !== null) {
		const initialisation = { kind: "normal", standardDeviation: config.embeddingInitMethodStd } as const;
		specs.push({
			name: positionEmbedding,
			shape: [learnedPositions, h],
			initialisation,
			shard: replicated,
			elementwise: true,
		});
	}
	for (const segment of segments) {
		for (const { index, prefix, kind } of layersOfSegment(config, segment)) {
			specs.push(
				...withAdapters(kinds[kind].parameters(configOfLayer(config, index)), config.lora).map((spec) => ({
					...spec,
					name: prefix + spec.name,
				})),
			);
		}
	}
	if (!hasHead) return specs;
	specs.push(...hiddenNorm(config, `${languageModelPrefix}decoder.final_norm.weight`));
	for (let depth = 0; depth < storedDepths(config); depth++) specs.push(...mtpParameters(config, depth));
	if (!tied) specs.push(vocabulary(`${languageModelPrefix}output_layer.weight`, std));
	if (rereadsEmbedding(config) && !embeds) specs.push(embeddingTable);
	return specs;
}

/** Parameters of an MTP depth beside those of its layers. */
function mtpParameters(config: HybridConfig, depth: number): ParameterSpec[] {
	const h = config.hiddenSize;
	const prefix = mtpPrefix(depth);
	const { inward } = distributions(config);
	return [
		...["enorm", "hnorm"].flatMap((name) => hiddenNorm(config, `${prefix}${name}.weight`)),
		{ name: `${prefix}eh_proj.weight`, shape: [h, 2 * h], initialisation: inward, shard: rows },
		...hiddenNorm(config, `${prefix}final_layernorm.weight`),
	];
}
