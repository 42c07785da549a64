/** config.json and golden.json of a mimo-* folder: a vision-language training run by Megatron-LM (see its README). */

import { join } from "node:path";
import * as v from "valibot";
import { parseHybridPattern } from "../../config/hybrid-pattern.ts";
import { configurationHas, readReferenceJson } from "../golden-fields.ts";
import { checkMimoGolden } from "./golden-checks.ts";

const configSchema = v.object({
	name: v.string(),
	language_model: v.object({
		pattern: v.pipe(
			v.string(),
			v.check((pattern) => !/[|/[\]]/.test(pattern), "not a layer pattern"),
			v.transform(parseHybridPattern),
		),
		hidden_size: v.number(),
		sequence_length: v.number(),
		vocab_size: v.number(),
		padded_vocab_size: v.number(),
		image_token_id: v.number(),
		tie_embeddings: v.boolean(),
		position_embedding: v.literal("none"),
		normalization: v.literal("RMSNorm"),
		norm_epsilon: v.number(),
		linear_bias: v.literal(false),
		final_norm: v.literal(true),
		hidden_dropout: v.literal(0),
		attention_dropout: v.literal(0),
		init_method_std: v.number(),
		attention: v.object({
			num_attention_heads: v.number(),
			num_query_groups: v.number(),
			kv_channels: v.number(),
			softmax_scale: v.number(),
			qk_norm: v.literal(false),
			causal: v.literal(true),
		}),
		mlp: v.object({ ffn_hidden_size: v.number(), activation: v.literal("squared_relu"), gated: v.literal(false) }),
		moe: v.object({
			num_experts: v.number(),
			router_topk: v.number(),
			ffn_hidden_size: v.number(),
			shared_expert_hidden_size: v.number(),
			shared_expert_gate: v.literal(false),
			activation: v.literal("squared_relu"),
			gated: v.literal(false),
			router_score_function: v.picklist(["sigmoid", "softmax"]),
			router_topk_scaling_factor: v.number(),
			router_pre_softmax: v.boolean(),
			router_num_groups: v.nullable(v.number()),
			router_group_topk: v.nullable(v.number()),
			router_enable_expert_bias: v.boolean(),
			router_bias_update_rate: v.number(),
			load_balancing_type: v.picklist(["seq_aux_loss", "aux_loss"]),
			aux_loss_coefficient: v.number(),
			z_loss_coefficient: v.nullable(v.number()),
			capacity_factor: v.null(),
			token_dropping: v.literal(false),
		}),
		mamba: v.object({
			num_heads: v.number(),
			head_dim: v.number(),
			num_groups: v.number(),
			state_dim: v.number(),
			conv_kernel: v.number(),
			chunk_size: v.number(),
			conv_bias: v.literal(true),
			projection_bias: v.literal(false),
			dt_clamp: v.null(),
			D_per: v.literal("head"),
			gated_norm_epsilon: v.number(),
		}),
	}),
	vision: v.object({
		patch_size: v.number(),
		num_layers: v.number(),
		hidden_size: v.number(),
		num_attention_heads: v.number(),
		num_query_groups: v.number(),
		kv_channels: v.number(),
		ffn_hidden_size: v.number(),
		activation: v.literal("fast_gelu"),
		normalization: v.literal("LayerNorm"),
		norm_epsilon: v.number(),
		pre_norm: v.literal(true),
		final_layernorm: v.boolean(),
		linear_bias: v.literal(true),
		embedder_bias: v.literal(false),
		qkv_bias: v.literal(true),
		causal: v.literal(false),
		softmax_scale: v.number(),
		dropout: v.literal(0),
		class_tokens: v.number(),
		class_tokens_get_position: v.literal(false),
		class_tokens_dropped: v.boolean(),
		position_table: v.object({ rows: v.number(), columns: v.number() }),
		position_mode: v.pipe(v.string(), v.includes("evaluation form")),
		resolution: v.picklist(["fixed", "dynamic"]),
		grid_rows: v.number(),
		grid_columns: v.number(),
		images_per_sample: v.literal(1),
		pixel_shuffle: v.boolean(),
		frozen: v.boolean(),
	}),
	projector: v.object({
		type: v.picklist(["affine", "mlp"]),
		input_size: v.number(),
		output_size: v.number(),
		normalization: v.null(),
		bias: v.literal(false),
		frozen: v.boolean(),
	}),
	optimizer: v.object({
		name: v.literal("AdamW"),
		lr: v.number(),
		betas: v.tuple([v.number(), v.number()]),
		eps: v.number(),
		weight_decay: v.number(),
		decoupled_weight_decay: v.literal(true),
		bias_correction: v.literal(true),
		schedule: v.literal("constant"),
		clip_grad: v.number(),
		no_weight_decay: v.array(v.string()),
	}),
	data: v.object({
		steps: v.number(),
		micro_batch_size: v.literal(1),
		microbatches_per_lane: v.number(),
		lanes: v.number(),
		image_shape: v.array(v.number()),
		image_hash: v.object({ first_seed_per_lane: v.array(v.number()), scale: v.number() }),
		/** [step, lane, microbatch], step and microbatch from 1, lane from 0. */
		text_only: v.optional(v.object({ samples: v.array(v.tuple([v.number(), v.number(), v.number()])) })),
		participants: v.optional(v.array(v.number())),
	}),
	layout: v.object({
		encoder: v.object({ tensor_parallel: v.number(), data_parallel: v.number() }),
		language: v.object({
			tensor_parallel: v.number(),
			data_parallel: v.number(),
			expert_parallel: v.number(),
			expert_tensor_parallel: v.number(),
		}),
	}),
	encoder_grad_participation: v.optional(v.picklist(["exact", "corrected"]), "exact"),
});

const probe = v.object({
	shape: v.array(v.number()),
	mean: v.number(),
	rms: v.number(),
	absmax: v.number(),
	head: v.optional(v.array(v.number()), []),
});

/** Number of tokens sent to each expert, which is kept of a router's map. */
const routerMap = v.object({ shape: v.array(v.number()), tokens_per_expert: v.array(v.number()) });

const goldenSchema = v.object({
	source: v.pipe(v.string(), v.includes("pretrain_mimo.py")),
	dtype: v.literal("float32"),
	/** Steps before the first routing decision that rounding flips. */
	exact_steps: v.number(),
	steps: v.array(
		v.object({
			loss: v.number(),
			grad_norm: v.number(),
			/** Absent without a balancing loss of sequences. */
			seq_load_balancing_loss: v.optional(v.number()),
			/** The balancing loss of sequences by layer. */
			seq_load_balancing_loss_layers: v.optional(v.record(v.string(), v.number())),
			lr: v.number(),
			loss_tokens: v.number(),
			/** Encoder ranks with images; absent where every sample has one. */
			participants: v.optional(v.number()),
			loss_band: v.number(),
			grad_norm_band: v.number(),
			seq_load_balancing_loss_band: v.optional(v.number()),
		}),
	),
	step1_probe: v.object({
		/** By lane: microbatch 1. */
		lanes: v.array(v.record(v.string(), v.union([probe, routerMap]))),
		logits_lanes: v.array(probe),
		/** Where they are recorded, lane 0 once more: its layers, by name, and its logits. */
		layer_names: v.optional(v.array(v.string())),
		layers: v.optional(v.array(probe)),
		logits: v.optional(probe),
		/** [lane][microbatch][expert] by router. */
		tokens_per_expert: v.record(v.string(), v.array(v.array(v.array(v.number())))),
		expert_bias_after_step1: v.record(v.string(), v.array(v.number())),
		grad_norm: v.record(v.string(), v.number()),
	}),
});

export type MimoGoldenConfig = v.InferOutput<typeof configSchema>;
export type MimoGolden = v.InferOutput<typeof goldenSchema>;
export type MimoProbe = v.InferOutput<typeof probe>;

/** Whether a folder's golden.json is that of a vision-language run. */
export function isMimoGolden(folder: string): boolean {
	return configurationHas(folder, "language_model", "vision");
}

/** Reads and checks both files; the error names the file and the field. */
export function readMimoGolden(folder: string): { config: MimoGoldenConfig; golden: MimoGolden } {
	const config = readReferenceJson(configSchema, join(folder, "config.json"));
	const golden = readReferenceJson(goldenSchema, join(folder, "golden.json"));
	checkMimoGolden(folder, config, golden);
	return { config, golden };
}

/** The layout a reference was run on, as `--layout` writes it. */
export function goldenLayout({ layout: { encoder, language } }: MimoGoldenConfig): string {
	const side = (sizes: Record<string, number>) =>
		Object.entries(sizes)
			.filter(([, size]) => size > 1)
			.map(([name, size]) => name + size)
			.join("") || "1";
	const languageSizes = {
		tp: language.tensor_parallel,
		dp: language.data_parallel,
		ep: language.expert_parallel,
		etp: language.expert_tensor_parallel,
	};
	return `${side({ tp: encoder.tensor_parallel, dp: encoder.data_parallel })}+${side(languageSizes)}`;
}
