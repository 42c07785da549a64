/**
 * Exact counts of parameters and FLOPs of a hybrid language model (docs/spec/language-model.md §9.2, §9.3). Buffers (expert bias)
 * are not counted.
 */
import { paddedVocabularySize } from "../../config/derive.ts";
import { type LayerKind, parsePattern } from "../../config/hybrid-pattern.ts";
import { modelOfLayer } from "../../config/per-layer.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { elementCount } from "../../tensor/index.ts";
import { isAdapterName } from "../lora.ts";
import type { ParameterSpec } from "../parameter-spec.ts";
import type { HybridConfig } from "./config.ts";
import { hybridConfig } from "./from-configuration.ts";
import { kinds } from "./kinds/index.ts";
import { languageModelPrefix } from "./layer-numbering.ts";
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

/** A layer of the main part with its own sizes, or one of an MTP depth. */
interface PassedLayer {
	readonly kind: LayerKind;
	readonly c: TrainingConfiguration;
}

function mainLayers(c: TrainingConfiguration): PassedLayer[] {
	const { segments } = parsePattern(c.hybridLayerPattern);
	return segments.flat(2).map((kind, index) => ({ kind, c: modelOfLayer(c, index) }));
}

/** Layers that a token passes: the main part, and each MTP depth. */
function passedLayers(c: TrainingConfiguration): PassedLayer[] {
	const { mtp } = parsePattern(c.hybridLayerPattern);
	const ahead = Array.from({ length: mtp?.depths ?? 0 }, () => mtp!.layers);
	return [...mainLayers(c), ...ahead.flat().map((kind) => ({ kind, c }))];
}

export interface FlopCounts {
	/** Forward FLOPs of a token in a layer of each kind, of the model's sizes. */
	readonly layer: Readonly<Record<LayerKind, number>>;
	/** Forward FLOPs of a token in each layer of the main part, by index. */
	readonly layers: readonly number[];
	readonly logits: number;
	/** Forward FLOPs of a token in the model. */
	readonly forward: number;
	/** Forward and backward FLOPs of a token: backward costs twice the forward. */
	readonly forwardBackward: number;
}

/** FLOPs per token at the configured sequence length; a multiply-add counts 2. */
export function countFlopsPerToken(c: TrainingConfiguration): FlopCounts {
	const h = c.hiddenSize;
	const all = passedLayers(c).map((one) => kinds[one.kind].flops(one.c));
	const logits = 2 * h * c.vocabSize;
	// Each MTP depth has a projection of two hidden states, and logits of its own.
	const depths = c.mtpNumLayers;
	const passed = all.reduce((sum, flops) => sum + flops, 0);
	const forward = passed + (1 + depths) * logits + depths * 2 * (2 * h) * h;
	const layers = all.slice(0, mainLayers(c).length);
	const layer = Object.fromEntries(
		Object.entries(kinds).map(([kind, { flops }]) => [kind, flops(c)]),
	) as FlopCounts["layer"];
	return { layer, layers, logits, forward, forwardBackward: 3 * forward };
}

/**
 * FLOPs of a step by Megatron's formula (docs/spec/runtime.md §6.5), for its TFLOP/s figure only.
 */
export function megatronFlopsPerStep(c: TrainingConfiguration): number {
	const tokens = c.globalBatchSize * c.seqLength;
	const logits = 2 * tokens * c.hiddenSize * paddedVocabularySize(c) * (1 + c.mtpNumLayers);
	const layers = passedLayers(c).reduce((sum, one) => sum + kinds[one.kind].megatronFlops(one.c, tokens), 0);
	return 3 * (layers + logits);
}
