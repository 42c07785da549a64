/** config.json and golden.json of an elastic-* folder: an elastic model trained by Megatron-LM (see its README). */
import * as v from "valibot";
import { type Axis, type AxisName, axisNames, layerKind } from "../../guests/elastic/axes.ts";
import type { ElasticConfig } from "../../guests/elastic/config.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { BandedFormat, type Precision } from "../comparison.ts";
import { adamW, describedRun, fixedModel, transformerConfig, valueProbe } from "../golden-fields.ts";
import { mtpModel } from "../mtp/parity.ts";

const sizes = v.pipe(v.array(v.number()), v.minLength(1));

const configSchema = v.object({
	...describedRun,
	steps: v.number(),
	transformer_config: transformerConfig({
		moe_router_load_balancing_type: v.literal("none"),
	}),
	flextron: v.object({
		soft_mask: v.boolean(),
		router_inter_dim: v.number(),
		loss_alpha: v.number(),
		tau_init: v.number(),
		tau_decay: v.number(),
		router_std: v.number(),
		normalize_router_logits: v.boolean(),
		linear_scaler_start: v.number(),
		linear_scaler_end: v.number(),
		budget_list: sizes,
		budget_type: v.literal("param"),
		param_budget_target: v.picklist(["active", "total"]),
		emb_int_list: sizes,
		mlp_int_list: sizes,
		mamba_int_list: sizes,
		moe_expert_int_list: sizes,
		flex_hetero_ffn: v.optional(v.boolean(), false),
		flex_hetero_mamba: v.optional(v.boolean(), false),
		flex_hetero_moe_expert: v.optional(v.boolean(), false),
	}),
	lr_mult_router: v.number(),
	fixed: v.object({
		...fixedModel,
		activation: v.literal("squared ReLU"),
	}),
});

const rows = v.union([v.array(v.number()), v.array(v.array(v.number()))]);
const row = v.union([v.number(), v.array(v.number())]);
const goldenAxis = v.object({ gumbel: rows, p: rows, chosen: row, expected: row });
const band = v.number();

const goldenSchema = v.object({
	optimizer: v.object({
		...adamW,
		no_weight_decay: v.array(v.string()),
	}),
	exact_steps: v.number(),
	submodel_loss_band: band,
	submodels: v.array(
		v.object({
			sizes: v.record(v.string(), row),
			loss: v.number(),
			logits: valueProbe,
		}),
	),
	parent_parameters: v.object({ total: v.number(), active: v.number() }),
	steps: v.array(
		v.object({
			microbatches: v.array(
				v.object({
					budget: v.number(),
					hard: v.boolean(),
					axes: v.record(v.string(), goldenAxis),
					expected_parameters: v.tuple([v.number(), v.number()]),
					budget_loss: v.number(),
					lm_loss: v.number(),
				}),
			),
			router_grad_norm: v.number(),
			model_grad_norm: v.number(),
			grad_norm: v.number(),
			loss: v.number(),
			loss_band: band,
			budget_loss_band: band,
			grad_norm_band: band,
			router_grad_norm_band: band,
			model_grad_norm_band: band,
			expected_parameters_band: band,
		}),
	),
	step1_grad_norm: v.record(v.string(), v.number()),
});

export type ElasticConfigFile = v.InferOutput<typeof configSchema>;
export type ElasticGolden = v.InferOutput<typeof goldenSchema>;

/** References of an elastic model. */
export const elasticFormat = new BandedFormat("flextron", { config: configSchema, golden: goldenSchema });

/** The parent that config.json describes. */
export function elasticModel({ transformer_config: t, ...file }: ElasticConfigFile, dtype: Precision): HybridConfig {
	return mtpModel({ ...file, transformer_config: { ...t, mtp_loss_scaling_factor: 0 } }, dtype);
}

/** Megatron's behaviour in all that the folder was made with. */
export function elasticConfig(
	{ flextron: f, lr_mult_router, steps }: ElasticConfigFile,
	model: HybridConfig,
): ElasticConfig {
	const lists: Partial<Record<AxisName, { sizes: readonly number[]; hetero: boolean }>> = {
		mlp: { sizes: f.mlp_int_list, hetero: f.flex_hetero_ffn },
		mamba: { sizes: f.mamba_int_list, hetero: f.flex_hetero_mamba },
		moe_expert: { sizes: f.moe_expert_int_list, hetero: f.flex_hetero_moe_expert },
		emb: { sizes: f.emb_int_list, hetero: false },
	};
	const layersOf = (name: AxisName) =>
		model.pattern.flatMap((symbol, layer) => (symbol === layerKind[name] ? [layer] : []));
	return {
		axes: axisNames.flatMap((name): Axis[] => {
			const list = lists[name];
			return list ? [{ name, sizes: list.sizes, layers: list.hetero ? layersOf(name) : null }] : [];
		}),
		ranking: [],
		budgets: f.budget_list,
		budgetProbabilities: null,
		parentProbability: 0,
		budget: { type: "param", target: f.param_budget_target },
		router: {
			width: f.router_inter_dim,
			standardDeviation: f.router_std,
			normalise: f.normalize_router_logits,
			frozen: false,
			learningRateMultiplier: lr_mult_router,
		},
		scale: { start: f.linear_scaler_start, end: f.linear_scaler_end, iterations: steps },
		temperature: { initial: f.tau_init, decay: f.tau_decay },
		hardThreshold: 1,
		softMask: f.soft_mask,
		lossWeight: f.loss_alpha,
		compat: true,
		seed: 1,
	};
}
