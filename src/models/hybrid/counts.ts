/**
 * How many parameters a hybrid language model has and what a token costs (language-model.md §9.2, §9.3), exactly. No
 * buffer (expert bias) is counted.
 */
import { paddedVocabularySize } from "../../config/derive.ts";
import { countLayers, type LayerSymbol, parseHybridPattern } from "../../config/hybrid-pattern.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";

type PerLayer = Readonly<Record<LayerSymbol, number>>;

export interface ParameterCounts {
	/** Parameters of one layer. */
	readonly layer: PerLayer;
	/** Parameters of one layer that a token meets: of an E layer only the chosen experts. */
	readonly activeLayer: PerLayer;
	/** Word embedding; the output layer has as many when it is not tied. */
	readonly embedding: number;
	readonly output: number;
	readonly total: number;
	/** Layers and final norm. */
	readonly active: number;
}

/** fc1 has a gate half too when the activation is gated. */
function firstLayerFactor(c: TrainingConfiguration): number {
	return c.swiglu || c.quickGeglu ? 2 : 1;
}

/** Sum over the pattern's layers. */
function sumOfLayers(c: TrainingConfiguration, perLayer: PerLayer): number {
	const layers = parseHybridPattern(c.hybridLayerPattern);
	return (Object.keys(perLayer) as LayerSymbol[]).reduce(
		(sum, symbol) => sum + countLayers(layers, symbol) * perLayer[symbol],
		0,
	);
}

export function countParameters(c: TrainingConfiguration): ParameterCounts {
	const h = c.hiddenSize;
	const inner = c.mambaNumHeads * c.mambaHeadDim;
	const convolution = inner + 2 * c.mambaNumGroups * c.mambaStateDim;
	const feedForward = (width: number) => (firstLayerFactor(c) + 1) * h * width;
	const mamba =
		h + // pre-norm
		h * (inner + convolution + c.mambaNumHeads) + // in_proj: z, x, B, C, dt
		convolution * (c.mambaConvKernelDim + 1) +
		3 * c.mambaNumHeads + // dt_bias, A_log, D
		inner + // gated norm
		inner * h;
	const attention =
		h + h * (c.numAttentionHeads + 2 * c.numQueryGroups) * c.kvChannels + h * c.numAttentionHeads * c.kvChannels;
	const dense = h + feedForward(c.ffnHiddenSize);
	const moe = (experts: number) =>
		h + c.numExperts * h + experts * feedForward(c.moeFfnHiddenSize) + feedForward(c.moeSharedExpertIntermediateSize);
	const layer: PerLayer = { M: mamba, "*": attention, "-": dense, E: moe(c.numExperts) };
	const activeLayer: PerLayer = { ...layer, E: moe(c.moeRouterTopk) };
	const embedding = paddedVocabularySize(c) * h;
	const output = c.untieEmbeddingsAndOutputWeights ? embedding : 0;
	return {
		layer,
		activeLayer,
		embedding,
		output,
		total: sumOfLayers(c, layer) + h + embedding + output,
		active: sumOfLayers(c, activeLayer) + h,
	};
}

export interface FlopCounts {
	/** Forward pass of one layer, one token. */
	readonly layer: PerLayer;
	readonly logits: number;
	/** Forward pass of the model, one token. */
	readonly forward: number;
	/** Forward and backward pass: backward costs twice the forward pass. */
	readonly forwardBackward: number;
}

/** Floating-point operations per token at the configured sequence length; a multiply-add counts 2. */
export function countFlopsPerToken(c: TrainingConfiguration): FlopCounts {
	const h = c.hiddenSize;
	const { mambaNumHeads: H, mambaHeadDim: P, mambaNumGroups: G, mambaStateDim: N, mambaChunkSize: Q } = c;
	const feedForward = (width: number) => 2 * (firstLayerFactor(c) + 1) * h * width;
	const mamba =
		2 * h * (2 * H * P + 2 * G * N + H) +
		2 * c.mambaConvKernelDim * (H * P + 2 * G * N) +
		(2 * Q * N * G + 2 * Q * P * H + 4 * P * N * H) +
		2 * H * P * h;
	const { numAttentionHeads: nq, numQueryGroups: ng, kvChannels: d } = c;
	const attention = 2 * h * (nq + 2 * ng) * d + 2 * c.seqLength * nq * d + 2 * nq * d * h;
	const moe =
		2 * c.numExperts * h +
		c.moeRouterTopk * feedForward(c.moeFfnHiddenSize) +
		feedForward(c.moeSharedExpertIntermediateSize);
	const layer: PerLayer = { M: mamba, "*": attention, "-": feedForward(c.ffnHiddenSize), E: moe };
	const logits = 2 * h * c.vocabSize;
	const forward = sumOfLayers(c, layer) + logits;
	return { layer, logits, forward, forwardBackward: 3 * forward };
}

/**
 * Operations of one step as Megatron counts them (runtime.md §6.5), for its TFLOP/s figure only: it takes d_inner = 2h
 * whatever the Mamba heads are, and leaves the router out.
 */
export function megatronFlopsPerStep(c: TrainingConfiguration): number {
	const layers = parseHybridPattern(c.hybridLayerPattern);
	const h = c.hiddenSize;
	const tokens = c.globalBatchSize * c.seqLength;
	const pairs = tokens * c.seqLength;
	const projection = (c.kvChannels * c.numAttentionHeads) / h;
	const gated = firstLayerFactor(c) === 2 ? 1.5 : 1;
	const inner = 2 * h;
	const attention =
		4 * tokens * h * projection * (h + (h * c.numQueryGroups) / c.numAttentionHeads) + 2 * pairs * h * projection;
	const dense = 4 * (c.ffnHiddenSize / h) * gated * tokens * h * h;
	const mamba =
		2 * tokens * h * (2 * inner + 2 * c.mambaNumGroups * c.mambaStateDim + c.mambaNumHeads) +
		7 * tokens * inner * c.mambaStateDim +
		2 * tokens * inner * h;
	const moe =
		4 * tokens * h * c.moeFfnHiddenSize * c.moeRouterTopk * gated +
		4 * tokens * h * c.moeSharedExpertIntermediateSize * gated;
	const perLayer: PerLayer = { "*": attention, "-": dense, M: mamba, E: moe };
	const logits = 2 * tokens * h * paddedVocabularySize(c);
	return 3 * (layers.reduce((sum, symbol) => sum + perLayer[symbol], 0) + logits);
}
