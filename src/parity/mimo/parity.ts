/** mimo-* reference folders: a vision-language model trained by Megatron-LM, on any layout. */
import { join } from "node:path";
import { loadModel, openSafetensors, openWeights } from "../../checkpoint/index.ts";
import { symbolsOf } from "../../config/hybrid-pattern.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { hybridConfig } from "../../models/language/from-configuration.ts";
import type { EncoderConfig } from "../../models/vision/encoder.ts";
import { plainProjector } from "../../models/vision/projector.ts";
import { plainTower } from "../../models/vit/config.ts";
import { visionEncoder } from "../../models/vit/tower.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import type { RunSpecification } from "../../train/run-specification.ts";
import type { Precision } from "../comparison.ts";
import { requireCuts } from "../layout-cuts.ts";
import { type ReferenceFormat, trainedBy } from "../reference.ts";
import { type Plan, participants, planOf } from "../verify/samples.ts";
import { MimoBatches } from "./batches.ts";
import { MimoComparison } from "./comparison.ts";
import { goldenLayout, isMimoGolden, type MimoGoldenConfig, readMimoGolden } from "./golden.ts";
import { participantsOf, samplesWithImages } from "./golden-checks.ts";

export const mimoReference: ReferenceFormat = {
	...{ hasEncoder: true, ownWeights: null, fp32Alone: null },
	holds: isMimoGolden,
	layout: (path) => goldenLayout(readMimoGolden(path).config),
	/**
	 * Microbatches hold one sample, or as many as tensor-parallel ranks can cut, which changes neither the loss nor a balancing loss
	 * of single sequences.
	 */
	plan: (layout, path) => {
		const { config } = readMimoGolden(path);
		requireCuts(layout, goldenLanguageConfig(config, "f32"), goldenEncoderConfig(config, "f32"));
		const { data, language_model: l } = config;
		const samples = data.lanes * data.microbatches_per_lane;
		const plan = planOf(layout, { samples, microBatchSize: 1, sequenceLength: l.sequence_length });
		if (plan.microBatchSize > 1 && l.moe.load_balancing_type === "aux_loss") {
			throw new UserError(
				`Layout ${layout.name} needs microbatches of ${counted(plan.microBatchSize, "sample")}; aux_loss is another loss then than the reference's.`,
			);
		}
		checkParticipation(path, config, plan);
		return plan;
	},
	open: (path, { layout: { topology }, rank, plan, precision, weights: given }) => {
		const { config, golden } = readMimoGolden(path);
		const batches = new MimoBatches(path, config);
		const weights = given === null ? openSafetensors(join(path, "model.safetensors")) : openWeights(given);
		let comparison: MimoComparison | null = null;
		return {
			specification: goldenSpecification(config, precision),
			optimizer: config.optimizer,
			steps: golden.steps.length,
			batch: (step) => batches.step(step),
			load: (run, partial) => loadModel(run, weights, partial),
			before: (run) => {
				comparison = new MimoComparison(
					{ folder: path, config, golden, batches },
					{ run, plan, topology, rank },
					weights,
				);
				return [];
			},
			watch: (_, step) => comparison!.watch(step),
			[Symbol.dispose]: () => weights[Symbol.dispose](),
		};
	},
};

/** The factor of a "corrected" folder depends on the number of encoder ranks: with another number the losses are others. */
function checkParticipation(path: string, config: MimoGoldenConfig, plan: Plan): void {
	if (config.encoder_grad_participation !== "corrected") return;
	const scales = `${path} scales the encoder's gradient by ${config.layout.encoder.data_parallel} data-parallel encoder ranks over those that saw images`;
	const ranks = plan.topology.encoders[0]!.lanes;
	if (ranks !== config.layout.encoder.data_parallel) {
		throw new UserError(`${scales}, and this layout has ${ranks}: its losses would differ.`);
	}
	for (let step = 0; step < config.data.steps; step++) {
		const [wanted, found] = [participantsOf(config, step), participants(plan, samplesWithImages(config, step))];
		if (found === wanted) continue;
		throw new UserError(
			`${scales}; in step ${step + 1} layout ${plan.name} has images on ${found} of them instead of ${wanted}: its losses would differ.`,
		);
	}
}

/** The run that a folder describes; which parameters decay is the rule of `mimo train`. */
export function goldenSpecification(config: MimoGoldenConfig, precision: Precision): RunSpecification {
	return {
		...trainedBy(config.optimizer),
		encoders: [
			{
				parts: visionEncoder(goldenEncoderConfig(config, precision)),
				placeholderId: config.language_model.image_token_id,
				frozen: { tower: config.vision.frozen, projector: config.projector.frozen },
				participation: { policy: config.encoder_grad_participation },
			},
		],
		language: goldenLanguageConfig(config, precision),
	};
}

// The two modules that config.json of a mimo-* folder describes.

function goldenLanguageConfig({ language_model: l }: MimoGoldenConfig, dtype: Precision): HybridConfig {
	const { attention, mamba, moe } = l;
	const config = hybridConfig({
		hybridLayerPattern: symbolsOf(l.pattern),
		hiddenSize: l.hidden_size,
		vocabSize: l.vocab_size,
		normEpsilon: l.norm_epsilon,
		initMethodStd: l.init_method_std,
		untieEmbeddingsAndOutputWeights: !l.tie_embeddings,
		bf16: dtype === "bf16",
		numAttentionHeads: attention.num_attention_heads,
		numQueryGroups: attention.num_query_groups,
		kvChannels: attention.kv_channels,
		softmaxScale: attention.softmax_scale,
		mambaNumHeads: mamba.num_heads,
		mambaHeadDim: mamba.head_dim,
		mambaNumGroups: mamba.num_groups,
		mambaStateDim: mamba.state_dim,
		mambaConvKernelDim: mamba.conv_kernel,
		mambaChunkSize: mamba.chunk_size,
		ffnHiddenSize: l.mlp.ffn_hidden_size,
		squaredRelu: true,
		numExperts: moe.num_experts,
		moeRouterTopk: moe.router_topk,
		moeFfnHiddenSize: moe.ffn_hidden_size,
		moeSharedExpertIntermediateSize: moe.shared_expert_hidden_size,
		moeRouterScoreFunction: moe.router_score_function,
		moeRouterPreSoftmax: moe.router_pre_softmax,
		moeRouterTopkScalingFactor: moe.router_topk_scaling_factor,
		moeRouterNumGroups: moe.router_num_groups ?? 1,
		moeRouterGroupTopk: moe.router_group_topk ?? 1,
		moeRouterEnableExpertBias: moe.router_enable_expert_bias,
		moeRouterBiasUpdateRate: moe.router_bias_update_rate,
		moeRouterLoadBalancingType: [moe.load_balancing_type],
		moeAuxLossCoeff: [moe.aux_loss_coefficient],
		moeZLossCoeff: moe.z_loss_coefficient ?? 0,
	});
	return {
		...config,
		paddedVocabularySize: l.padded_vocab_size,
		mamba: { ...config.mamba, gatedNormEpsilon: mamba.gated_norm_epsilon },
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
			...plainTower,
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
			...plainProjector,
			initMethodStd: std,
			outputInitMethodStd: outward,
			lora: null,
		},
	};
}
