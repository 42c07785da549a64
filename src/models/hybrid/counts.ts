/**
 * Exact counts of parameters and FLOPs of a hybrid language model (docs/spec/language-model.md §9.2, §9.3). Buffers (expert bias)
 * are not counted.
 */
import { hasGatedActivation, paddedVocabularySize } from "../../config/derive.ts";
import { type LayerSymbol, parsePattern } from "../../config/hybrid-pattern.ts";
import { modelOfLayer } from "../../config/per-layer.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { elementCount } from "../../tensor/tensor.ts";
import type { ParameterSpec } from "../parameter-spec.ts";
import type { HybridConfig } from "./config.ts";
import { hybridConfig } from "./from-configuration.ts";
import { languageModelPrefix } from "./layer-numbering.ts";
import { isAdapterName } from "./lora.ts";
import { hybridParameters } from "./names.ts";

export interface ParameterCounts {
	/** All parameters, vocabulary padding included. */
	readonly total: number;
	/** Parameters of layers and final norm that a token activates: of routed experts only top-k. */
	readonly active: number;
	/** Parameters of the word embedding; an untied output layer has as many. */
	readonly embedding: number;
	readonly output: number;
	/** Parameters of low-rank adapters; the other counts leave them out. */
	readonly adapters: number;
}

export function countParameters(c: TrainingConfiguration): ParameterCounts {
	return parametersOf(hybridConfig(c));
}

/** Sums over the shapes of the model's parameters. */
export function parametersOf(config: HybridConfig): ParameterCounts {
	const both = hybridParameters(config);
	const specs = both.filter(({ name }) => !isAdapterName(name));
	const sum = (some: readonly ParameterSpec[], experts: (of: number) => number) =>
		some.reduce((total, spec) => total + elementCount(spec.shape) * experts(spec.experts ?? 1), 0);
	const vocabulary = (part: string) => specs.filter(({ name }) => name.startsWith(`${languageModelPrefix}${part}.`));
	const all = (some: readonly ParameterSpec[]) => sum(some, (experts) => experts);
	const [embedding, output] = [all(vocabulary("embedding")), all(vocabulary("output_layer"))];
	const met = sum(specs, (experts) => (experts === 1 ? 1 : Math.min(experts, config.moe.topk)));
	const adapters = all(both) - all(specs);
	return { total: all(specs), active: met - embedding - output, embedding, output, adapters };
}

type PerLayer = Readonly<Record<LayerSymbol, number>>;

/** 2 if the activation is gated, since fc1 then has a gate half too; else 1. */
function firstLayerFactor(c: TrainingConfiguration): number {
	return hasGatedActivation(c) ? 2 : 1;
}

/** A layer of the main part with its own sizes, or one of an MTP depth. */
interface PassedLayer {
	readonly symbol: LayerSymbol;
	readonly c: TrainingConfiguration;
}

function mainLayers(c: TrainingConfiguration): PassedLayer[] {
	const { segments } = parsePattern(c.hybridLayerPattern);
	return segments.flat(2).map((symbol, index) => ({ symbol, c: modelOfLayer(c, index) }));
}

/** Layers that a token passes: the main part, and each MTP depth. */
function passedLayers(c: TrainingConfiguration): PassedLayer[] {
	const { mtp } = parsePattern(c.hybridLayerPattern);
	const ahead = Array.from({ length: mtp?.depths ?? 0 }, () => mtp!.layers);
	return [...mainLayers(c), ...ahead.flat().map((symbol) => ({ symbol, c }))];
}

export interface FlopCounts {
	/** Forward FLOPs of a token in a layer of each kind, of the model's sizes. */
	readonly layer: PerLayer;
	/** Forward FLOPs of a token in each layer of the main part, by index. */
	readonly layers: readonly number[];
	readonly logits: number;
	/** Forward FLOPs of a token in the model. */
	readonly forward: number;
	/** Forward and backward FLOPs of a token: backward costs twice the forward. */
	readonly forwardBackward: number;
}

/** Forward FLOPs of a token in a layer of each kind, of the configured sizes. */
function layerFlops(c: TrainingConfiguration): PerLayer {
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
	return { M: mamba, "*": attention, "-": feedForward(c.ffnHiddenSize), E: moe };
}

/** FLOPs per token at the configured sequence length; a multiply-add counts 2. */
export function countFlopsPerToken(c: TrainingConfiguration): FlopCounts {
	const h = c.hiddenSize;
	const all = passedLayers(c).map((one) => layerFlops(one.c)[one.symbol]);
	const logits = 2 * h * c.vocabSize;
	// Each MTP depth has a projection of two hidden states, and logits of its own.
	const depths = c.mtpNumLayers;
	const passed = all.reduce((sum, flops) => sum + flops, 0);
	const forward = passed + (1 + depths) * logits + depths * 2 * (2 * h) * h;
	const layers = all.slice(0, mainLayers(c).length);
	return { layer: layerFlops(c), layers, logits, forward, forwardBackward: 3 * forward };
}

/**
 * FLOPs of a step by Megatron's formula (docs/spec/runtime.md §6.5), for its TFLOP/s figure only: d_inner = 2h whatever the Mamba
 * heads are, and no router.
 */
export function megatronFlopsPerStep(c: TrainingConfiguration): number {
	const tokens = c.globalBatchSize * c.seqLength;
	const logits = 2 * tokens * c.hiddenSize * paddedVocabularySize(c) * (1 + c.mtpNumLayers);
	const layers = passedLayers(c).reduce((sum, one) => sum + megatronLayerFlops(one.c)[one.symbol], 0);
	return 3 * (layers + logits);
}

function megatronLayerFlops(c: TrainingConfiguration): PerLayer {
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
	return { "*": attention, "-": dense, M: mamba, E: moe };
}
