/** The parameters of the hybrid language model: Megatron's logical names, shapes, initial values and sharding. */
import type { LayerSymbol } from "../../config/hybrid-pattern.ts";
import type { Shard } from "../../parallel/shard.ts";
import { isGatedActivation } from "../../tensor/ops/activation.ts";
import type { Initialisation, ParameterSpec } from "../parameter-spec.ts";
import { configOfLayer, type HybridConfig, mambaSizes } from "./config.ts";
import { languageModelPrefix, layersOfSegment, mtpPrefix, storedDepths } from "./layer-numbering.ts";
import { withAdapters } from "./lora.ts";
import { type PipelineSegment, wholeModel } from "./pipeline-segments.ts";

const replicated: Shard = { kind: "replicated" };
const rows: Shard = { kind: "split", dimension: 0 };
const columns: Shard = { kind: "split", dimension: 1 };
const ones: Initialisation = { kind: "constant", value: 1 };
const zeros: Initialisation = { kind: "constant", value: 0 };

/** Name of the word embedding, which is the output layer too if tied. */
export const wordEmbedding = `${languageModelPrefix}embedding.word_embeddings.weight`;

/** The parameters of the given segments in forward order. */
export function hybridParameters(
	config: HybridConfig,
	segments: readonly PipelineSegment[] = [wholeModel(config.pattern.length)],
): ParameterSpec[] {
	const { initMethodStd: std, hiddenSize: h, paddedVocabularySize: v, tieWordEmbeddings: tied } = config;
	const vocabulary = (name: string, standardDeviation: number): ParameterSpec => ({
		name,
		shape: [v, h],
		initialisation: { kind: "normal", standardDeviation },
		shard: rows,
		liveRows: config.vocabularySize,
	});
	const embeds = segments.some((segment) => segment.embeds);
	const hasHead = segments.some((segment) => segment.hasHead);
	// A tied output layer, or MTP depths, on another stage than the embedding read a copy; the gradients of both are summed.
	const rereads = tied || config.mtp !== null;
	const copied = rereads && embeds !== hasHead;
	const embeddingTable: ParameterSpec = {
		...vocabulary(wordEmbedding, config.embeddingInitMethodStd),
		...(copied && { copy: { counted: embeds } }),
	};
	const specs: ParameterSpec[] = embeds ? [embeddingTable] : [];
	for (const segment of segments) {
		for (const { index, prefix, symbol } of layersOfSegment(config, segment)) {
			specs.push(
				...withAdapters(layerParameters(configOfLayer(config, index), symbol), config.lora).map((spec) => ({
					...spec,
					name: prefix + spec.name,
				})),
			);
		}
	}
	if (!hasHead) return specs;
	specs.push(normWeight(`${languageModelPrefix}decoder.final_norm.weight`, h));
	for (let depth = 0; depth < storedDepths(config); depth++) specs.push(...mtpParameters(config, depth));
	if (!tied) specs.push(vocabulary(`${languageModelPrefix}output_layer.weight`, std));
	if (rereads && !embeds) specs.push(embeddingTable);
	return specs;
}

/** Parameters of an MTP depth beside those of its layers. */
function mtpParameters(config: HybridConfig, depth: number): ParameterSpec[] {
	const h = config.hiddenSize;
	const prefix = mtpPrefix(depth);
	const { inward } = distributions(config);
	return [
		...["enorm", "hnorm"].map((name) => normWeight(`${prefix}${name}.weight`, h)),
		{ name: `${prefix}eh_proj.weight`, shape: [h, 2 * h], initialisation: inward, shard: rows },
		normWeight(`${prefix}final_layernorm.weight`, h),
	];
}

function normWeight(name: string, width: number): ParameterSpec {
	return { name, shape: [width], initialisation: ones, shard: replicated };
}

function layerParameters(config: HybridConfig, symbol: LayerSymbol): ParameterSpec[] {
	switch (symbol) {
		case "M":
			return mambaParameters(config);
		case "*":
			return attentionParameters(config);
		case "-":
			return mlpParameters(config);
		case "E":
			return moeParameters(config);
	}
}

/**
 * Initialisations of inner projections and of those into the residual stream, which are smaller: σ0 / sqrt(layers)
 * (docs/spec/language-model.md §6.1).
 */
function distributions(config: HybridConfig): { inward: Initialisation; outward: Initialisation } {
	const std = config.initMethodStd;
	return {
		inward: { kind: "normal", standardDeviation: std },
		outward: { kind: "normal", standardDeviation: std / Math.sqrt(config.pattern.length) },
	};
}

function mambaParameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, mamba } = config;
	const { inner, groupState, convolution, projection } = mambaSizes(mamba);
	const { inward, outward } = distributions(config);
	const bound = 1 / Math.sqrt(mamba.convKernel);
	const convolutionInit: Initialisation = { kind: "uniform", low: -bound, high: bound };
	const convolutionShard: Shard = { kind: "split", dimension: 0, blocks: [inner, groupState, groupState] };
	return [
		normWeight("mixer.in_proj.layer_norm_weight", h),
		{
			name: "mixer.in_proj.weight",
			shape: [projection, h],
			initialisation: inward,
			shard: { kind: "split", dimension: 0, blocks: [inner, inner, groupState, groupState, mamba.heads] },
		},
		{
			name: "mixer.conv1d_weight",
			shape: [convolution, 1, mamba.convKernel],
			initialisation: convolutionInit,
			shard: convolutionShard,
		},
		{ name: "mixer.conv1d_bias", shape: [convolution], initialisation: convolutionInit, shard: convolutionShard },
		{
			name: "mixer.dt_bias",
			shape: [mamba.heads],
			initialisation: { kind: "inverse-softplus", low: 0.001, high: 0.1, floor: 1e-4 },
			shard: rows,
			alwaysF32: true,
		},
		{
			name: "mixer.A_log",
			shape: [mamba.heads],
			initialisation: { kind: "log-uniform", low: 1, high: 16 },
			shard: rows,
			alwaysF32: true,
		},
		{ name: "mixer.D", shape: [mamba.heads], initialisation: ones, shard: rows, alwaysF32: true },
		{ name: "mixer.norm.weight", shape: [inner], initialisation: ones, shard: rows },
		{ name: "mixer.out_proj.weight", shape: [h, inner], initialisation: outward, shard: columns },
	];
}

function attentionParameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, attention } = config;
	const { inward, outward } = distributions(config);
	const fused = (attention.heads + 2 * attention.queryGroups) * attention.headDim;
	return [
		normWeight("self_attention.linear_qkv.layer_norm_weight", h),
		{ name: "self_attention.linear_qkv.weight", shape: [fused, h], initialisation: inward, shard: rows },
		{
			name: "self_attention.linear_proj.weight",
			shape: [h, attention.heads * attention.headDim],
			initialisation: outward,
			shard: columns,
		},
		...biases(config, "self_attention.linear_qkv.bias", fused, rows),
		...biases(config, "self_attention.linear_proj.bias", h, replicated),
	];
}

/** The bias of a projection, if the model has biases. */
function biases(config: HybridConfig, name: string, width: number, shard: Shard): ParameterSpec[] {
	if (config.biases === "none") return [];
	const initialisation = config.biases === "drawn" ? distributions(config).inward : zeros;
	return [{ name, shape: [width], initialisation, shard }];
}

/**
 * Sharding of fc1: gated, it holds the gate half and the linear half, or alternating runs of both; each half is sharded on its
 * own.
 */
function firstLayerShard(config: HybridConfig, width: number, interleave: number): Shard {
	if (!isGatedActivation(config.mlp.activation)) return rows;
	return { kind: "split", dimension: 0, blocks: [width, width], ...(interleave > 0 && { interleave }) };
}

function feedForward(config: HybridConfig, prefix: string, width: number, interleave = 0): ParameterSpec[] {
	const { inward, outward } = distributions(config);
	const h = config.hiddenSize;
	const firstRows = isGatedActivation(config.mlp.activation) ? 2 * width : width;
	const shard = firstLayerShard(config, width, interleave);
	return [
		{ name: `${prefix}linear_fc1.weight`, shape: [firstRows, h], initialisation: inward, shard },
		...biases(config, `${prefix}linear_fc1.bias`, firstRows, shard),
		{ name: `${prefix}linear_fc2.weight`, shape: [h, width], initialisation: outward, shard: columns },
		...biases(config, `${prefix}linear_fc2.bias`, h, replicated),
	];
}

function mlpParameters(config: HybridConfig): ParameterSpec[] {
	return [
		normWeight("mlp.linear_fc1.layer_norm_weight", config.hiddenSize),
		...feedForward(config, "mlp.", config.mlp.ffnHiddenSize),
	];
}

function moeParameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, moe } = config;
	const { inward } = distributions(config);
	const specs: ParameterSpec[] = [
		normWeight("pre_mlp_layernorm.weight", h),
		{
			name: "mlp.router.weight",
			shape: [moe.experts, h],
			initialisation: inward,
			shard: replicated,
		},
		// Megatron initialises the router's bias as a weight.
		...biases(config, "mlp.router.bias", moe.experts, replicated).map((spec) => ({ ...spec, initialisation: inward })),
		...feedForward(config, "mlp.experts.", moe.ffnHiddenSize, moe.interleave).map((spec) => ({
			...spec,
			experts: moe.experts,
		})),
	];
	if (moe.sharedExpertSize > 0) specs.push(...feedForward(config, "mlp.shared_experts.", moe.sharedExpertSize));
	return specs;
}
