/** config.json and golden.json of a mtp-* folder: multi-token prediction trained by Megatron-LM (see its README). */
import * as v from "valibot";
import { type HybridConfig, noBiases } from "../../models/language/config.ts";
import { layersOfPattern } from "../../models/language/from-configuration.ts";
import { BandedFormat } from "../bands.ts";
import type { Precision } from "../comparison.ts";
import { adamW, describedRun, fixedModel, referenceExperts, transformerConfig, valueProbe } from "../golden-fields.ts";

const configSchema = v.object({
	...describedRun,
	activation: v.literal("squared ReLU"),
	transformer_config: transformerConfig({
		moe_router_load_balancing_type: v.picklist(["none", "seq_aux_loss"]),
		mtp_loss_scaling_factor: v.number(),
	}),
	fixed: v.object({
		...fixedModel,
		router_dtype: v.literal("fp32"),
	}),
	no_weight_decay: v.array(v.string()),
});

const goldenSchema = v.object({
	optimizer: v.object({
		...adamW,
	}),
	/** Steps before the first routing decision that rounding flips. */
	exact_steps: v.number(),
	steps: v.array(
		v.object({
			step: v.number(),
			loss: v.number(),
			/** Token means; absent: not recorded. */
			loss_per_microbatch: v.optional(v.array(v.number()), []),
			/** Of every depth. */
			mtp_loss: v.array(v.number()),
			grad_norm: v.number(),
			loss_band: v.number(),
			mtp_loss_band: v.number(),
			grad_norm_band: v.number(),
		}),
	),
	expert_bias_after_last_step: v.record(v.string(), v.array(v.number())),
	/** Values of every call of a module in step 1: each further call has one more ' after its name. */
	step1_probe: v.object({ layers: v.record(v.string(), valueProbe), grad_norm: v.record(v.string(), v.number()) }),
});

export type MtpConfigFile = v.InferOutput<typeof configSchema>;
export type MtpGolden = v.InferOutput<typeof goldenSchema>;

/** References of multi-token prediction. */
export const mtpFormat = new BandedFormat("mtp_pattern", { config: configSchema, golden: goldenSchema });

/** The part of a Megatron reference's configuration that decides its model. */
export type DescribedModel = Pick<MtpConfigFile, "pattern" | "vocab_size" | "layernorm_epsilon"> & {
	readonly transformer_config: MtpConfigFile["transformer_config"];
	readonly fixed: Pick<MtpConfigFile["fixed"], "untied" | "router_score" | "dropout" | "mamba_chunk" | "conv_width">;
};

/** The model that config.json describes. */
export function mtpModel(
	{ pattern, vocab_size: vocabularySize, layernorm_epsilon: epsilon, transformer_config: t, fixed }: DescribedModel,
	dtype: Precision,
): HybridConfig {
	return {
		...layersOfPattern(pattern, {
			repeated: t.mtp_use_repeated_layer,
			lossScalingFactor: t.mtp_loss_scaling_factor,
		}),
		hiddenSize: t.hidden_size,
		vocabularySize,
		paddedVocabularySize: vocabularySize,
		normEpsilon: epsilon,
		// The weights come with the folder.
		initMethodStd: 0,
		embeddingInitMethodStd: 0,
		hiddenDropout: fixed.dropout,
		tieWordEmbeddings: !fixed.untied,
		dtype,
		crossEntropyRoundsBf16: false,
		zLossCoefficient: 0,
		attention: {
			heads: t.num_attention_heads,
			queryGroups: t.num_query_groups,
			headDim: t.kv_channels,
			softmaxScale: 1 / Math.sqrt(t.kv_channels),
			dropout: fixed.dropout,
			rope: null,
			qkNorm: false,
		},
		mamba: {
			heads: t.mamba_num_heads,
			headDim: t.mamba_head_dim,
			groups: t.mamba_num_groups,
			stateDim: t.mamba_state_dim,
			convKernel: fixed.conv_width,
			chunkSize: fixed.mamba_chunk,
			gatedNormEpsilon: 1e-5,
			timeStepMinimum: 0,
		},
		biases: noBiases,
		mlp: {
			ffnHiddenSize: t.ffn_hidden_size,
			activation: "squaredRelu",
			clamp: Number.POSITIVE_INFINITY,
			linearOffset: 0,
		},
		moe: {
			experts: t.num_moe_experts,
			topk: t.moe_router_topk,
			ffnHiddenSize: t.moe_ffn_hidden_size,
			sharedExpertSize: t.moe_shared_expert_intermediate_size,
			scoreFunction: fixed.router_score,
			preSoftmax: false,
			scalingFactor: t.moe_router_topk_scaling_factor,
			groups: 1,
			groupTopk: 1,
			groupScoreTopk: t.moe_router_topk,
			expertBias: true,
			biasUpdateRate: t.moe_router_bias_update_rate,
			forceLoadBalancing: false,
			balancing:
				t.moe_router_load_balancing_type === "none"
					? []
					: [{ type: t.moe_router_load_balancing_type, coefficient: t.moe_aux_loss_coeff }],
			zLossCoefficient: t.moe_z_loss_coeff ?? 0,
			...referenceExperts,
		},
		ofLayer: new Map(),
		lora: null,
		recompute: null,
	};
}
