/**
 * Trains a language model with multi-token prediction as a mtp-* reference folder did and compares: step 1 value by value, then
 * every step's losses and gradient norm, at the end the expert biases. Tolerances are those of the references' README.
 */

import { join } from "node:path";
import * as v from "valibot";
import {
	type Correspondence,
	CorrespondenceBuilder,
	gatherTensors,
	loadModel,
	MappedStore,
	openSafetensors,
	planTensors,
	readTensor,
	type TensorStore,
} from "../../checkpoint/index.ts";
import { lossTokens } from "../../data/microbatch.ts";
import { depthLoss } from "../../guests/mtp/mtp.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { hybridConfig } from "../../models/language/from-configuration.ts";
import { languageModelPrefix } from "../../models/language/layer-numbering.ts";
import { UserError } from "../../system/errors.ts";
import type { Run } from "../../train/assemble.ts";
import type { LossMean } from "../../train/loss-weights.ts";
import type { StepResult } from "../../train/step-state.ts";
import { BandedFormat, bandLimit, type Check, type Precision } from "../comparison.ts";
import {
	adamW,
	describedRun,
	fixedModel,
	lossMeanOfReference,
	transformerConfig,
	valueProbe,
} from "../golden-fields.ts";
import { type StepOne, watchedStep } from "../language/probes.ts";
import { requireCuts } from "../layout-cuts.ts";
import { reduceHost } from "../probe-sums.ts";
import { checksOfStep, languageRun, type ReferenceFormat } from "../reference.ts";
import { MicrobatchLosses, readTokenBatches, tokensOfMicrobatches } from "../token-batches.ts";
import { planOf, requireEqualMicrobatches } from "../verify/samples.ts";

/** Largest difference of an expert bias: it moves by whole rates. */
const biasLimit = 1e-6;

/** mtp-* folders, a language model with multi-token prediction trained by Megatron-LM. */
export const mtpReference: ReferenceFormat = {
	...{ hasEncoder: false, ownWeights: "a reference of multi-token prediction", fp32Alone: null },
	holds: (path) => mtpFormat.holds(path),
	layout: () => "1",
	plan: (layout, path) => {
		const { config, golden } = mtpFormat.read(path);
		requireCuts(layout, mtpModel(config, "f32"), null);
		const { batch, microbatches, seq } = config;
		const plan = planOf(layout, { samples: batch * microbatches, microBatchSize: batch, sequenceLength: seq });
		const samples = readTokenBatches(path, config, golden.steps.length).flat();
		if (samples.some(({ text }) => lossTokens(text) < seq)) {
			requireEqualMicrobatches(
				plan,
				{ microBatchSize: batch },
				`the mask of ${path} has gaps, and a depth's loss is divided by the loss tokens of its microbatch`,
			);
		}
		return plan;
	},
	open: (path, { plan, precision }) => {
		const { config: file, golden } = mtpFormat.read(path);
		using opened = new DisposableStack();
		const weights = opened.use(openSafetensors(join(path, "model.safetensors")));
		const names = megatronNames(weights, path);
		const excluded = new Set(file.no_weight_decay);
		const steps = golden.steps.length;
		const batches = readTokenBatches(path, file, steps);
		const stepOne = stepOneOf(file, golden, names);
		const mean = lossMeanOfReference(file.transformer_config);
		const run = languageRun(mtpModel(file, precision), golden.optimizer);
		const weightDecayMultiplier = (name: string) => (excluded.has(name.slice(languageModelPrefix.length)) ? 0 : 1);
		const kept = opened.move();
		return {
			specification: { ...run, lossMean: mean, adam: { ...run.adam, weightDecayMultiplier } },
			optimizer: golden.optimizer,
			steps,
			batch: (step) => batches[step]!,
			load: ({ language }, partial) =>
				loadModel(language!, new MappedStore(weights, planTensors(weights, names, "logical")), partial),
			before: null,
			watch: (run, index, microbatches) => {
				const own = new MicrobatchLosses(run, plan, file, microbatches);
				const tokens = tokensOfMicrobatches(batches[index]!, file);
				return watchedStep(stepOne, plan, run, index, {
					forward: own.observe,
					checks: (result) => [
						...lossChecks(index, golden.steps[index]!, result, { means: own.means(tokens), tokens, mean }),
						...(index === steps - 1 ? biasChecks(run, golden) : []),
					],
				});
			},
			[Symbol.dispose]: () => kept.dispose(),
		};
	},
};

/** Losses and gradient norm of a step. `own`: the microbatches' mean losses, and what the gradient is the mean of. */
function lossChecks(
	index: number,
	expected: MtpGolden["steps"][number],
	{ loss, losses, gradientNorm }: StepResult,
	own: { readonly means: readonly number[]; readonly tokens: readonly number[]; readonly mean: LossMean },
): Check[] {
	const check = checksOfStep(index);
	const limit = bandLimit("loss", expected.loss_band);
	const mean = (values: readonly number[]) => values.reduce((sum, value) => sum + value, 0) / values.length;
	const total = own.tokens.reduce((sum, count) => sum + count, 0);
	const perMicrobatch = expected.loss_per_microbatch;
	const ofTokens = perMicrobatch.reduce((sum, value, at) => sum + value * own.tokens[at]!, 0) / total;
	const distance = (value: number) => Math.abs(expected.loss - value);
	// Megatron logs the mean of tokens in both modes; another log may have the mean that the gradient is of.
	const logsMeans = own.mean === "microbatches" && distance(mean(perMicrobatch)) < distance(ofTokens);
	return [
		check("loss", expected.loss, logsMeans ? mean(own.means) : loss, limit),
		...perMicrobatch.map((wanted, at) =>
			check(`loss of microbatch ${at + 1}`, wanted, own.means[at] ?? Number.NaN, limit),
		),
		...expected.mtp_loss.map((wanted, depth) => {
			const name = depthLoss(depth);
			return check(name, wanted, losses[name] ?? Number.NaN, bandLimit("loss", expected.mtp_loss_band));
		}),
		check("gradient norm", expected.grad_norm, gradientNorm, bandLimit("grad_norm", expected.grad_norm_band)),
	];
}

/** Megatron's names are those of this program without its prefix. */
function megatronNames(weights: TensorStore, path: string): Correspondence {
	const builder = new CorrespondenceBuilder(path);
	for (const [name, { shape }] of weights.tensors) builder.same(languageModelPrefix + name, name, shape);
	return builder;
}

/** Probes and gradient norms of step 1. A microbatch makes `of` calls of a module, and `call` is the number of a call. */
function stepOneOf(
	{ batch, seq, microbatches, pattern, transformer_config: { mtp_use_repeated_layer: repeated } }: MtpConfigFile,
	{ step1_probe: { layers, grad_norm } }: MtpGolden,
	names: Correspondence,
): StepOne {
	const values = new Map<string, (typeof layers)[string][]>();
	const add = (observed: string, name: string, call = 0, of = 1) => {
		const found = Array.from({ length: microbatches }, (_, m) => layers[name + "'".repeat(m * of + call)]);
		if (found.some((probe) => probe === undefined)) throw new UserError(`golden.json has no step1_probe of ${name}.`);
		values.set(observed, found as (typeof layers)[string][]);
	};
	const main = pattern.split("/")[0]!.length;
	const depths = pattern.split("/").slice(1);
	// The embedding is read once for the main part, then once for every depth; logits of the depths come first.
	add("embedding", "embedding", 0, depths.length + 1);
	for (let layer = 0; layer < main; layer++) add(`layer.${layer}`, `decoder.layers.${layer}`);
	add("final_norm", "decoder.final_norm");
	for (const [depth, own] of depths.entries()) {
		const place = `mtp.layers.${repeated ? 0 : depth}`;
		const ofDepth = (observed: string, name: string) =>
			add(`mtp.${depth}.${observed}`, `${place}.${name}`, repeated ? depth : 0, repeated ? depths.length : 1);
		ofDepth("eh_proj", "eh_proj");
		for (const at of [...own].keys()) ofDepth(`layer.${at}`, `mtp_model_layer.layers.${at}`);
		ofDepth("final_layernorm", "final_layernorm");
		add(`mtp.${depth}.logits`, "logits", depth, depths.length + 1);
	}
	add("logits", "logits", depths.length, depths.length + 1);
	return { batch, seq, values, gradNorm: grad_norm, names };
}

/** Every expert's bias after the last step. */
function biasChecks(run: Run, golden: MtpGolden): Check[] {
	const { state } = run;
	const expected = Object.entries(golden.expert_bias_after_last_step);
	const largest = new Float64Array(expected.length);
	using whole = gatherTensors("the expert biases", run, state.world, state.scalars.device, run.counts);
	if (whole !== null) {
		expected.forEach(([name, wanted], at) => {
			const values = readTensor(whole, languageModelPrefix + name) as Float32Array;
			largest[at] = Math.max(...wanted.map((value, expert) => Math.abs(value - (values[expert] ?? Number.NaN))));
		});
	}
	reduceHost(state.world, state.scalars.device, largest);
	return expected.map(([name], at) => {
		return { name: `last ${name}`, expected: 0, actual: largest[at]!, error: largest[at]!, limit: biasLimit };
	});
}

// config.json and golden.json of a mtp-* folder: multi-token prediction trained by Megatron-LM (see its README).

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

type MtpConfigFile = v.InferOutput<typeof configSchema>;
type MtpGolden = v.InferOutput<typeof goldenSchema>;

/** References of multi-token prediction. */
export const mtpFormat = new BandedFormat("mtp_pattern", { config: configSchema, golden: goldenSchema });

/** The part of a Megatron reference's configuration that decides its model. */
type DescribedModel = Pick<MtpConfigFile, "pattern" | "vocab_size" | "layernorm_epsilon"> & {
	readonly transformer_config: MtpConfigFile["transformer_config"];
	readonly fixed: Pick<MtpConfigFile["fixed"], "untied" | "router_score" | "dropout" | "mamba_chunk" | "conv_width">;
};

/** The model that config.json describes. */
export function mtpModel(
	{ pattern, vocab_size: vocabSize, layernorm_epsilon: normEpsilon, transformer_config: t, fixed }: DescribedModel,
	dtype: Precision,
): HybridConfig {
	return hybridConfig({
		hybridLayerPattern: pattern,
		mtpUseRepeatedLayer: t.mtp_use_repeated_layer,
		mtpLossScalingFactor: t.mtp_loss_scaling_factor,
		hiddenSize: t.hidden_size,
		vocabSize,
		makeVocabSizeDivisibleBy: 1,
		normEpsilon,
		// The weights come with the folder.
		initMethodStd: 0,
		...{ hiddenDropout: fixed.dropout, attentionDropout: fixed.dropout },
		untieEmbeddingsAndOutputWeights: fixed.untied,
		bf16: dtype === "bf16",
		numAttentionHeads: t.num_attention_heads,
		numQueryGroups: t.num_query_groups,
		kvChannels: t.kv_channels,
		mambaNumHeads: t.mamba_num_heads,
		mambaHeadDim: t.mamba_head_dim,
		mambaNumGroups: t.mamba_num_groups,
		mambaStateDim: t.mamba_state_dim,
		mambaConvKernelDim: fixed.conv_width,
		mambaChunkSize: fixed.mamba_chunk,
		ffnHiddenSize: t.ffn_hidden_size,
		squaredRelu: true,
		numExperts: t.num_moe_experts,
		moeRouterTopk: t.moe_router_topk,
		moeFfnHiddenSize: t.moe_ffn_hidden_size,
		moeSharedExpertIntermediateSize: t.moe_shared_expert_intermediate_size,
		moeRouterScoreFunction: fixed.router_score,
		moeRouterTopkScalingFactor: t.moe_router_topk_scaling_factor,
		moeRouterEnableExpertBias: true,
		moeRouterBiasUpdateRate: t.moe_router_bias_update_rate,
		moeRouterLoadBalancingType: [t.moe_router_load_balancing_type],
		moeAuxLossCoeff: [t.moe_aux_loss_coeff],
		moeZLossCoeff: t.moe_z_loss_coeff ?? 0,
	});
}
