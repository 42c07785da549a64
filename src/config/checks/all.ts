/** All checks of several keys together; larger subjects have files of their own. */
import { activationsThat, flaggedActivations } from "../../native/activations.ts";
import { dataLanes, hasEncoder, hasGatedActivation, sharesRanks, wandbFolder } from "../derive.ts";
import { hasLayer, PatternError, parseHybridPattern } from "../hybrid-pattern.ts";
import { isLlava, lackingOfPublished } from "../published-model.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, divides, unless } from "./check.ts";
import { energonChecks, indexedChecks, tokenizerChecks } from "./data.ts";
import { distillationChecks } from "./distillation.ts";
import { elasticChecks } from "./elastic.ts";
import { expertChecks } from "./experts.ts";
import { latentAttentionChecks } from "./latent-attention.ts";
import { layoutChecks, weightShardChecks } from "./layout.ts";
import { loraChecks } from "./lora.ts";
import { moduleChecks } from "./modules.ts";
import { perLayerChecks } from "./per-layer.ts";
import { recomputeChecks } from "./recompute.ts";
import { visionChecks } from "./vision.ts";

/** Checked first, because derived defaults read the pattern. */
export const patternIsLegal: Check = (c) => {
	try {
		parseHybridPattern(c.hybridLayerPattern);
		return null;
	} catch (error) {
		if (error instanceof PatternError) return { key: "hybrid-layer-pattern", message: error.reason };
		throw error;
	}
};

const model: readonly Check[] = [
	divides(
		"num-attention-heads",
		(c) => c.numAttentionHeads,
		"num-query-groups",
		(c) => c.numQueryGroups,
	),
	divides(
		"mamba-num-heads",
		(c) => c.mambaNumHeads,
		"mamba-num-groups",
		(c) => c.mambaNumGroups,
	),
	(c) =>
		unless(
			c.seqLength <= c.maxPositionEmbeddings,
			"max-position-embeddings",
			`allowed is at least seq-length (${c.seqLength})`,
		),
	(c) => {
		const given = flaggedActivations.filter(([name]) => c[name]).map(([, { flag }]) => flag);
		return unless(given.length <= 1, given[1]!, `allowed is one activation, and ${given[0]} is on`);
	},
	(c) =>
		unless(
			c.activationFuncClampValue === null || hasGatedActivation(c),
			"activation-func-clamp-value",
			`allowed only with ${activationsThat("gated")}`,
		),
	(c) => unless(c.gluLinearOffset === 0 || c.quickGeglu, "glu-linear-offset", "allowed is 0 without quick-geglu"),
	(c) =>
		unless(
			!c.disableBiasLinear || !c.addBiasLinear,
			"disable-bias-linear",
			"allowed is one of add-bias-linear and disable-bias-linear, and both are on",
		),
	(c) =>
		unless(
			!["rope", "yarn"].includes(c.positionEmbeddingType) || (c.kvChannels * c.rotaryPercent) % 2 === 0,
			"rotary-percent",
			`allowed is a share that makes an even number of kv-channels (${c.kvChannels})`,
		),
	(c) =>
		unless(
			c.normalization === "RMSNorm" || !c.qkLayernorm,
			"qk-layernorm",
			"allowed with normalization LayerNorm is false",
		),
	(c) =>
		unless(
			c.normalization === "RMSNorm" || !c.applyLayernorm1p,
			"apply-layernorm-1p",
			"allowed with normalization LayerNorm is false",
		),
	(c) =>
		unless(
			!hasLayer(c.hybridLayerPattern, "gdn") || c.linearNumValueHeads % c.linearNumKeyHeads === 0,
			"linear-num-value-heads",
			`allowed is a multiple of linear-num-key-heads (${c.linearNumKeyHeads})`,
		),
	({ windowSize: size }) =>
		unless(
			size === null || (size.length === 2 && size[1] === 0),
			"window-size",
			"allowed are two numbers: the keys before a query, and 0 after it, as attention is causal",
		),
	({ windowSize, windowAttnSkipFreq: skip, numLayers, mtpNumLayers }) =>
		unless(
			skip === null ||
				(windowSize !== null &&
					mtpNumLayers === 0 &&
					(skip.length === 1 ? skip[0]! > 0 : skip.length === numLayers && skip.every((one) => one <= 1))),
			"window-attn-skip-freq",
			`allowed with window-size and without multi-token prediction are a number from 1, and a list of 0 and 1 for ${numLayers} layers`,
		),
	(c) =>
		unless(
			c.positionEmbeddingType !== "learned_absolute" || c.mtpNumLayers === 0,
			"position-embedding-type",
			"allowed with multi-token prediction is none, rope or yarn",
		),
	(c) =>
		unless(
			c.rotaryBaseLocal === null || (c.positionEmbeddingType === "rope" && c.windowSize !== null),
			"rotary-base-local",
			"allowed only with position-embedding-type rope and window-size",
		),
	(c) =>
		unless(
			!c.useRopeScaling || c.positionEmbeddingType === "rope",
			"use-rope-scaling",
			"allowed only with position-embedding-type rope",
		),
	(c) =>
		unless(
			c.rotarySeqLenInterpolationFactor === null || (c.positionEmbeddingType === "rope" && !c.useRopeScaling),
			"rotary-seq-len-interpolation-factor",
			"allowed only with position-embedding-type rope, without use-rope-scaling",
		),
	(c) =>
		unless(
			c.positionEmbeddingType !== "yarn" || (c.rotaryBase > 1 && c.yarnBetaFast >= c.yarnBetaSlow),
			c.rotaryBase > 1 ? "yarn-beta-fast" : "rotary-base",
			c.rotaryBase > 1 ? `allowed is at least yarn-beta-slow (${c.yarnBetaSlow})` : "allowed with YaRN is more than 1",
		),
	(c) =>
		unless(
			c.ropeScalingHighFreqFactor > c.ropeScalingLowFreqFactor,
			"rope-scaling-high-freq-factor",
			`allowed is more than rope-scaling-low-freq-factor (${c.ropeScalingLowFreqFactor})`,
		),
];

const optimizer: readonly Check[] = [
	(c) => unless(c.minLr <= c.lr, "min-lr", `allowed is at most lr (${c.lr})`),
	(c) =>
		unless(
			c.optimizer !== "muon" || c.loraRank === null,
			"optimizer",
			"allowed with lora-rank is adam: an adapter is a product, which steps along each of its factors do not make orthogonal",
		),
	(c) => unless(c.lrWarmupInit <= c.lr, "lr-warmup-init", `allowed is at most lr (${c.lr})`),
	(c) =>
		unless(
			c.weightDecayIncrStyle !== "constant" || c.startWeightDecay === null,
			"start-weight-decay",
			"allowed only with weight-decay-incr-style linear or cosine",
		),
	(c) =>
		unless(
			c.weightDecayIncrStyle !== "constant" || c.endWeightDecay === null,
			"end-weight-decay",
			"allowed only with weight-decay-incr-style linear or cosine",
		),
	(c) =>
		unless(
			c.weightDecayIncrStyle === "constant" || (c.startWeightDecay !== null && c.endWeightDecay !== null),
			"weight-decay-incr-style",
			"it needs start-weight-decay and end-weight-decay",
		),
];

/** Refuses keys in samples beside keys in steps. */
function mixing(key: Key, given: (c: TrainingConfiguration) => boolean, mode: "iters" | "samples"): Check {
	return (c) => {
		const bySamples = c.trainSamples !== null && c.trainIters === null;
		return unless(!given(c) || bySamples === (mode === "samples"), key, `allowed only with train-${mode}`);
	};
}

/** Skipped for a configuration whose file could not be parsed. */
export const lengthIsGiven: Check = (c) =>
	unless(
		c.trainIters !== null || c.trainSamples !== null || c.trainEpochs !== null,
		"train-iters",
		"it, train-samples or train-epochs has to be given (flag --train-iters, or a preset)",
	);

const schedule: readonly Check[] = [
	(c) =>
		unless(
			c.trainIters === null || c.trainSamples === null,
			"train-samples",
			`allowed is one of train-iters and train-samples, and train-iters is ${c.trainIters}`,
		),
	(c) => {
		const other = c.trainIters === null ? "train-samples" : "train-iters";
		const value = c.trainIters ?? c.trainSamples;
		return unless(
			value === null || c.trainEpochs === null,
			"train-epochs",
			`allowed is one of train-iters, train-samples and train-epochs, and ${other} is ${value}`,
		);
	},
	mixing("lr-warmup-iters", (c) => c.lrWarmupIters > 0, "iters"),
	mixing("lr-warmup-samples", (c) => c.lrWarmupSamples > 0, "samples"),
	mixing("lr-decay-iters", (c) => c.lrDecayIters !== null, "iters"),
	mixing("lr-decay-samples", (c) => c.lrDecaySamples !== null, "samples"),
	mixing("lr-wsd-decay-iters", (c) => c.lrWsdDecayIters !== null, "iters"),
	mixing("lr-wsd-decay-samples", (c) => c.lrWsdDecaySamples !== null, "samples"),
	(c) =>
		unless(
			c.lrWarmupFraction === null || (c.lrWarmupIters === 0 && c.lrWarmupSamples === 0),
			"lr-warmup-fraction",
			"allowed only without lr-warmup-iters and lr-warmup-samples",
		),
	(c) => {
		const horizon = c.lrDecayIters ?? c.trainIters;
		const name = c.lrDecayIters === null ? "train-iters" : "lr-decay-iters";
		return unless(
			horizon === null || c.lrWarmupIters === 0 || c.lrWarmupIters < horizon,
			"lr-warmup-iters",
			`allowed is less than ${name}, which is ${horizon}`,
		);
	},
	(c) => {
		const horizon = c.lrDecaySamples ?? c.trainSamples;
		const name = c.lrDecaySamples === null ? "train-samples" : "lr-decay-samples";
		return unless(
			horizon === null || c.lrWarmupSamples === 0 || c.lrWarmupSamples < horizon,
			"lr-warmup-samples",
			`allowed is less than ${name}, which is ${horizon}`,
		);
	},
	(c) =>
		unless(c.expAvgDtype === "fp32" || decaysInBf16(c.adamBeta1), "exp-avg-dtype", `it needs ${betaOf("adam-beta1")}`),
	(c) =>
		unless(
			c.expAvgSqDtype === "fp32" || decaysInBf16(c.adamBeta2),
			"exp-avg-sq-dtype",
			`it needs ${betaOf("adam-beta2")}`,
		),
	(c) =>
		unless(
			c.lrDecayStyle !== "WSD" || c.lrWsdDecayIters !== null || c.lrWsdDecaySamples !== null,
			"lr-decay-style",
			"it needs lr-wsd-decay-iters or lr-wsd-decay-samples",
		),
	(c) => {
		const step = c.microBatchSize * dataLanes(c);
		return unless(
			c.globalBatchSize % step === 0,
			"global-batch-size",
			`allowed is a multiple of micro-batch-size × data lanes (${step})`,
		);
	},
	(c) => {
		if (c.evalGlobalBatchSize === c.globalBatchSize && c.evalMicroBatchSize === c.microBatchSize) return null;
		const step = c.evalMicroBatchSize * dataLanes(c);
		return unless(
			c.evalGlobalBatchSize % step === 0,
			"eval-global-batch-size",
			`allowed is a multiple of eval-micro-batch-size × data lanes (${step})`,
		);
	},
	(c) =>
		unless(
			!(c.overrideOptParamScheduler && c.useCheckpointOptParamScheduler),
			"use-checkpoint-opt-param-scheduler",
			"allowed only without override-opt-param-scheduler",
		),
];

/** Whether beta times a bf16 number rounds to a smaller one: neighbours are at most 2⁻⁷ of it apart, and half of that rounds. */
function decaysInBf16(beta: number): boolean {
	return 1 - beta > 2 ** -8;
}

function betaOf(key: Key): string {
	return `${key} below ${1 - 2 ** -8}: a moment in bf16 would never decay, each step's change rounded away`;
}

/** Megatron's conditions for mimo-encoder-prefetch. */
const prefetchConditions: readonly (readonly [what: string, holds: (c: TrainingConfiguration) => boolean])[] = [
	["an encoder on ranks of its own", (c) => hasEncoder(c) && !sharesRanks(c)],
	["freeze-vit", (c) => c.freezeVit],
	["a projector that trains (no freeze-projection)", (c) => !c.freezeProjection],
	["encoder-tp 1", (c) => c.encoderTp === 1],
	["encoder-pp 1", (c) => c.encoderPp === 1],
	["encoder-balance number", (c) => c.encoderBalance === "number"],
];

const prefetch = prefetchConditions.map(
	([what, holds]): Check =>
		(c) =>
			unless(!c.mimoEncoderPrefetch || holds(c), "mimo-encoder-prefetch", `it needs ${what}`),
);

/** Keys of MLflow and Weights & Biases that need another key. */
const trackers: readonly Check[] = [
	(c) => unless(c.mlflowRunName === null || c.mlflowDir !== null, "mlflow-run-name", "it needs mlflow-dir"),
	(c) => unless(c.mlflowExperiment === "Default" || c.mlflowDir !== null, "mlflow-experiment", "it needs mlflow-dir"),
	(c) => unless(c.wandbProject === null || wandbFolder(c) !== null, "wandb-project", "it needs wandb-save-dir or save"),
	(c) =>
		unless(
			c.wandbExpName === null || wandbFolder(c) !== null,
			"wandb-exp-name",
			"it needs wandb-project or wandb-save-dir",
		),
	(c) =>
		unless(
			c.wandbEntity === null || wandbFolder(c) !== null,
			"wandb-entity",
			"it needs wandb-project or wandb-save-dir",
		),
];

const other: readonly Check[] = [
	(c) => unless(c.cudaGraphImpl === "none" || c.device !== "cpu", "cuda-graph-impl", "allowed on the CPU is none"),
	(c) =>
		unless(
			c.algorithmChoice === "heuristic" || c.device !== "cpu",
			"algorithm-choice",
			"allowed on the CPU is heuristic",
		),
	(c) =>
		unless(
			c.algorithmCacheFolder === null || c.algorithmChoice !== "heuristic",
			"algorithm-cache-folder",
			"it needs algorithm-choice cached or timed",
		),
	(c) =>
		unless(c.profileStepEnd === null || c.profileStepStart !== null, "profile-step-end", "it needs profile-step-start"),
	(c) =>
		unless(
			c.profileStepStart === null || (c.profileStepEnd ?? c.profileStepStart) >= c.profileStepStart,
			"profile-step-end",
			`allowed is at least profile-step-start, which is ${c.profileStepStart}`,
		),
	(c) => {
		const stores = [
			["save", c.save],
			["load", c.load],
			["pretrained-checkpoint", c.pretrainedCheckpoint],
			["save-hf", c.saveHf],
			["save-peft", c.savePeft],
		] as const;
		const [key] = stores.find(([, path]) => path !== null && /^(?!s3:|https?:)[\w+.-]+:\/\//.test(path)) ?? [];
		const places = "allowed are a folder, s3://BUCKET/PREFIX and https://HOST/PATH";
		return unless(key === undefined, key!, places);
	},
	(c) => unless(c.ckptStep === null || c.load !== null, "ckpt-step", "it needs load"),
	(c) => unless(!c.saveOver || c.save !== null, "save-over", "it needs save"),
	(c) => {
		// A folder of a whole model, or a checkpoint that came from one, has a config.json of its own.
		const described = c.load !== null || (c.loadHf !== null && c.loadVision === null);
		const lacking = hasEncoder(c) && c.saveHf !== null && !described && !isLlava(c) ? lackingOfPublished(c) : null;
		return lacking === null ? null : { key: "save-hf", message: lacking };
	},
	(c) =>
		unless(
			(c.loadVision === null && c.loadProjector === null) || hasEncoder(c),
			c.loadVision === null ? "load-projector" : "load-vision",
			"allowed only with an encoder (model-provider nemotron-moe-vlm, without llm-only)",
		),
	(c) =>
		unless(
			c.datasetProvider === "mock" || c.datasetProvider === "indexed" || c.dataPath !== null,
			"dataset-provider",
			"it needs data-path",
		),
	...indexedChecks,
	(c) =>
		unless(
			c.evalCaptions === 0 || (c.datasetProvider === "energon" && c.dataEndId !== null),
			"eval-captions",
			"it needs Energon data and data-end-id",
		),
	(c) =>
		unless(
			c.evalCaptions === 0 || c.evalCaptions >= c.evalMicroBatchSize * dataLanes(c),
			"eval-captions",
			`allowed is at least eval-micro-batch-size × data lanes (${c.evalMicroBatchSize * dataLanes(c)})`,
		),
	(c) =>
		unless(
			/^\d+(\.\d+)?(,\s*\d+(\.\d+)?){0,2}$/.test(c.split) && /[1-9]/.test(c.split),
			"split",
			"allowed are up to three numbers such as 969,30,1",
		),
];

export const checks: readonly Check[] = [
	...weightShardChecks,
	...model,
	...expertChecks,
	...optimizer,
	...schedule,
	...layoutChecks,
	...moduleChecks,
	...recomputeChecks,
	...tokenizerChecks,
	...perLayerChecks,
	...latentAttentionChecks,
	...energonChecks,
	...loraChecks,
	...elasticChecks,
	...distillationChecks,
	...prefetch,
	...trackers,
	...visionChecks,
	...other,
];
