/** mimo-* reference folders: a vision-language model trained by Megatron-LM, on any layout. */
import { join } from "node:path";
import { loadModel, openSafetensors, openWeights } from "../../checkpoint/index.ts";
import { type HybridConfig, linearAttentionConfig, noBiases } from "../../models/language/config.ts";
import { visionEncoder } from "../../models/radio/tower.ts";
import type { EncoderConfig } from "../../models/vision/encoder.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import type { RunSpecification } from "../../train/run-specification.ts";
import type { Precision } from "../comparison.ts";
import { referenceExperts } from "../golden-fields.ts";
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
			localRopeBase: null,
			qkNorm: false,
			sinks: false,
			outputGate: false,
			window: null,
		},
		latent: null,
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
		linearAttention: linearAttentionConfig({}),
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
		offload: null,
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
