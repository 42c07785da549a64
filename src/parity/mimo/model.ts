/** The two modules that config.json of a mimo-* folder describes. */
import { type HybridConfig, noBiases } from "../../models/language/config.ts";
import type { EncoderConfig } from "../../models/vision/encoder.ts";
import type { Precision } from "../comparison.ts";
import { referenceExperts } from "../golden-fields.ts";
import type { MimoGoldenConfig } from "./golden.ts";

export function goldenLanguageConfig({ language_model: l }: MimoGoldenConfig, dtype: Precision): HybridConfig {
	const { attention, mamba, moe } = l;
	return {
		pattern: l.pattern,
		blocks: l.pattern.map(() => 1),
		mtp: null,
		hiddenSize: l.hidden_size,
		vocabularySize: l.vocab_size,
		paddedVocabularySize: l.padded_vocab_size,
		normalization: "RMSNorm",
		zeroCentredNorms: false,
		postNorms: false,
		embedding: { scale: 1, paddingId: null },
		learnedPositions: null,
		normEpsilon: l.norm_epsilon,
		initMethodStd: l.init_method_std,
		embeddingInitMethodStd: l.init_method_std,
		hiddenDropout: 0,
		tieWordEmbeddings: l.tie_embeddings,
		dtype,
		crossEntropyRoundsBf16: false,
		zLossCoefficient: 0,
		attention: {
			heads: attention.num_attention_heads,
			queryGroups: attention.num_query_groups,
			headDim: attention.kv_channels,
			softmaxScale: attention.softmax_scale,
			dropout: 0,
			rope: null,
			qkNorm: false,
			window: null,
		},
		mamba: {
			heads: mamba.num_heads,
			headDim: mamba.head_dim,
			groups: mamba.num_groups,
			stateDim: mamba.state_dim,
			convKernel: mamba.conv_kernel,
			chunkSize: mamba.chunk_size,
			gatedNormEpsilon: mamba.gated_norm_epsilon,
			timeStepMinimum: 0,
		},
		biases: noBiases,
		mlp: {
			ffnHiddenSize: l.mlp.ffn_hidden_size,
			activation: "squaredRelu",
			clamp: Number.POSITIVE_INFINITY,
			linearOffset: 0,
		},
		moe: {
			experts: moe.num_experts,
			topk: moe.router_topk,
			ffnHiddenSize: moe.ffn_hidden_size,
			sharedExpertSize: moe.shared_expert_hidden_size,
			scoreFunction: moe.router_score_function,
			preSoftmax: moe.router_pre_softmax,
			scalingFactor: moe.router_topk_scaling_factor,
			groups: moe.router_num_groups ?? 1,
			groupTopk: moe.router_group_topk ?? 1,
			groupScoreTopk: moe.router_topk / (moe.router_group_topk ?? 1),
			expertBias: moe.router_enable_expert_bias,
			biasUpdateRate: moe.router_bias_update_rate,
			forceLoadBalancing: false,
			balancing: [{ type: moe.load_balancing_type, coefficient: moe.aux_loss_coefficient }],
			zLossCoefficient: moe.z_loss_coefficient ?? 0,
			...referenceExperts,
		},
		ofLayer: new Map(),
		lora: null,
		recompute: null,
	};
}

export function goldenEncoderConfig(
	{ vision, projector, language_model: l }: MimoGoldenConfig,
	dtype: Precision,
): EncoderConfig {
	const std = l.init_method_std;
	// Upstream copies the language model's initialisation, its depth included (docs/spec/vision.md §1.2).
	const outward = std / Math.sqrt(l.pattern.length);
	return {
		tower: {
			layers: vision.num_layers,
			hiddenSize: vision.hidden_size,
			heads: vision.num_attention_heads,
			headDim: vision.kv_channels,
			ffnHiddenSize: vision.ffn_hidden_size,
			normEpsilon: vision.norm_epsilon,
			softmaxScale: vision.softmax_scale,
			patchSize: vision.patch_size,
			classTokens: vision.class_tokens,
			positionTable: vision.position_table,
			positions: { mode: "cpe", aspectRatioSelect: false, randomCrop: false },
			activation: "geluTanh",
			finalLayerNorm: vision.final_layernorm,
			dropClassTokens: vision.class_tokens_dropped,
			pixelShuffle: vision.pixel_shuffle,
			initMethodStd: std,
			outputInitMethodStd: outward,
			lora: null,
			dtype,
		},
		projector: {
			type: projector.type,
			inputSize: projector.input_size,
			outputSize: projector.output_size,
			ffnHiddenSize: 4 * projector.input_size,
			normEpsilon: null,
			initMethodStd: std,
			outputInitMethodStd: outward,
			lora: null,
		},
	};
}
