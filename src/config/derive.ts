/** Defaults that are computed from other keys, and quantities that several folders derive from a configuration. */
import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { type ActivationKey, activationOf, isGatedActivation } from "../native/activations.ts";
import { ReadGuard } from "../native/files.ts";
import { watched } from "../system/read-watch.ts";
import { chatTemplateFile } from "./chat-template-file.ts";
import { fileKind } from "./file-kind.ts";
import { hasLayer, parseHybridPattern, parsePattern } from "./hybrid-pattern.ts";
import { moduleRanks } from "./modules.ts";
import type { DerivedKey, TrainingConfiguration } from "./schema.ts";

/** The machine that a configuration is resolved for. */
export interface Surroundings {
	/** GPUs that this host's ranks see; null: not known. */
	readonly gpus: number | null;
	/** Ranks that the run has, from its launcher; null: as many as the configuration needs. */
	readonly ranks: number | null;
}

const unknownSurroundings: Surroundings = { gpus: null, ranks: null };

export type Derivation = (configuration: TrainingConfiguration, around?: Surroundings) => unknown;

/**
 * Parts into which Megatron would cut a weight beyond tensor parallelism (gtp). Here they are extra data parallelism
 * (docs/spec/runtime.md §1.5): the same lanes, the same samples in each.
 */
export function weightShards(c: TrainingConfiguration): { readonly dense: number; readonly expert: number } {
	return {
		dense: c.tensorParallelNumWeightShards / c.llmTp,
		expert: c.expertTensorParallelNumWeightShards / c.llmExptTp,
	};
}

/** Data lanes: microbatches of different data that the language model takes at once (docs/spec/runtime.md §0). */
export function dataLanes(c: TrainingConfiguration): number {
	return (c.llmDp * c.tensorParallelNumWeightShards) / c.llmTp;
}

/** Ranks of the language model's grid. */
export function languageRanks(c: TrainingConfiguration): number {
	return c.llmTp * c.llmCp * c.llmPp * dataLanes(c);
}

/**
 * Number of encoder lanes that take whole microbatches of one language lane in turn, where several encoder lanes cannot
 * share a microbatch's samples equally. 1: each has a part of every microbatch.
 */
export function encoderTurns(c: TrainingConfiguration): number {
	const lanes = dataLanes(c);
	return (c.microBatchSize * lanes) % c.encoderDp === 0 ? 1 : c.encoderDp / lanes;
}

/** Samples of an encoder lane's microbatch (docs/spec/runtime.md §1.3), in the microbatches that are its turn. */
export function encoderMicroBatchSize(c: TrainingConfiguration): number {
	return (encoderTurns(c) * c.microBatchSize * dataLanes(c)) / c.encoderDp;
}

/** Ranks of the vision encoder's grid. */
export function encoderRanks(c: TrainingConfiguration): number {
	return c.encoderTp * c.encoderDp * c.encoderPp;
}

/** Whether vision encoder and language model live on the same ranks: both start at one rank and have equally many. */
export function sharesRanks(c: TrainingConfiguration): boolean {
	const equal = encoderRanks(c) === languageRanks(c);
	return hasEncoder(c) && c.llmOffset === moduleRanks(c) && equal;
}

/**
 * First rank of the language model where llm-offset is not given. `gpus`: GPUs that this host's ranks see; null: not known. With one
 * GPU, on which NCCL joins no two ranks, modules of one rank each share a rank.
 */
export function defaultOffset(c: TrainingConfiguration, gpus: number | null = null): number {
	const others = moduleRanks(c);
	if (!hasEncoder(c)) return others;
	const together = others === 0 && encoderRanks(c) === 1 && languageRanks(c) === 1 && !c.mimoEncoderPrefetch;
	return together && gpus === 1 && c.device !== "cpu" && c.distributedBackend === "nccl" ? 0 : encoderRanks(c) + others;
}

/**
 * Replicas of the language model where llm-dp is not given: those that the launcher's ranks hold behind the other modules', as in
 * Megatron; 1 where they do not hold a whole number, or are not known.
 */
function languageReplicas(c: TrainingConfiguration, { ranks } = unknownSurroundings): number {
	const others = moduleRanks(c) + (hasEncoder(c) ? encoderRanks(c) : 0);
	const first = "llmOffset" in c ? c.llmOffset : others;
	const replicas = ranks === null ? 1 : (ranks - first) / (c.tensorParallelNumWeightShards * c.llmCp * c.llmPp);
	return Number.isSafeInteger(replicas) && replicas > 0 ? replicas : 1;
}

/** Whether a vision encoder runs beside the language model. */
export function hasEncoder(c: TrainingConfiguration): boolean {
	return c.modelProvider === "nemotron-moe-vlm" && !c.llmOnly;
}

/** Whether text becomes tokens by a tokenizer; otherwise bytes are tokens. */
export function hasTokenizer({
	tokenizer,
	tokenizerType,
	vocabFile,
}: Pick<TrainingConfiguration, "tokenizer" | "tokenizerType" | "vocabFile">): boolean {
	return tokenizer !== null || tokenizerType !== null || vocabFile !== null;
}

/** Whether the activation of MLPs and experts multiplies a gate half with a linear half. */
export function hasGatedActivation(c: Pick<TrainingConfiguration, ActivationKey>): boolean {
	return isGatedActivation(activationOf(c));
}

/** Width of the rows that the tower gives to the projector. */
export function projectorInput(c: Pick<TrainingConfiguration, "visionHiddenSize" | "pixelShuffle">): number {
	return c.pixelShuffle ? 4 * c.visionHiddenSize : c.visionHiddenSize;
}

/**
 * Rows of embedding and output layer: vocab-size rounded up to a multiple of make-vocab-size-divisible-by. Megatron's
 * multiple grows with llm-tp; here the layout never changes the model, and llm-tp has to divide the rows.
 */
export function paddedVocabularySize({
	vocabSize,
	makeVocabSizeDivisibleBy: unit,
}: Pick<TrainingConfiguration, "vocabSize" | "makeVocabSizeDivisibleBy">): number {
	return Math.ceil(vocabSize / unit) * unit;
}

/** Folder for Weights & Biases, by Megatron's rule; null: none is written. */
export function wandbFolder({
	wandbSaveDir,
	wandbProject,
	save,
}: Pick<TrainingConfiguration, "wandbSaveDir" | "wandbProject" | "save">): string | null {
	return wandbSaveDir ?? (wandbProject === null || save === null || save.includes("://") ? null : join(save, "wandb"));
}

/** Whether only Energon data have such a path: a URL, folder, JSONL file or metadataset. */
function isEnergonPath(path: string): boolean {
	if (/^[a-z][a-z0-9+.-]*:\/\//i.test(path) || /\.(?:jsonl|yaml)$/.test(path)) return true;
	return existsSync(path) && statSync(path).isDirectory();
}

/** Whether a path is a prefix of Megatron's indexed data, or a blend. */
function isIndexedPath(path: string): boolean {
	if (/^\d*\.?\d+\s/.test(path)) return true;
	const words = existsSync(path) ? [path] : [path, ...path.split(/\s+/)];
	const prefixes = words.map((word) => word.replace(/\.(?:bin|idx)$/, ""));
	return prefixes.some((prefix) => existsSync(`${prefix}.idx`) && existsSync(`${prefix}.bin`));
}

/** In the order of computation; a derivation returns undefined if the key has to be given. */
export const derivations: Readonly<Record<DerivedKey, Derivation>> = {
	lr: (c) => (c.loraRank !== null ? 1e-4 : c.loadHf !== null || c.pretrainedCheckpoint !== null ? 2e-5 : 3e-4),
	"mtp-num-layers": (c) => parsePattern(c.hybridLayerPattern).mtp?.depths ?? 0,
	"num-layers": (c) => parseHybridPattern(c.hybridLayerPattern).length,
	"ffn-hidden-size": (c) => 4 * c.hiddenSize,
	"num-attention-heads": (c) => (hasLayer(c.hybridLayerPattern, "attention", "latentAttention") ? undefined : 1),
	"num-query-groups": (c) => c.numAttentionHeads,
	"kv-channels": (c) => c.hiddenSize / c.numAttentionHeads,
	"multi-latent-attention": (c) => hasLayer(c.hybridLayerPattern, "latentAttention"),
	"latent-norm-epsilon": (c) => c.normEpsilon,
	"rotary-interleaved": (c) => hasLayer(c.hybridLayerPattern, "latentAttention"),
	"embedding-init-method-std": (c) => c.initMethodStd,
	"max-position-embeddings": (c) => c.seqLength,
	"mamba-num-heads": (c) =>
		hasLayer(c.hybridLayerPattern, "mamba") ? (2 * c.hiddenSize) / c.mambaHeadDim : c.mambaNumGroups,
	"num-experts": (c) => (hasLayer(c.hybridLayerPattern, "moe") ? undefined : 0),
	"moe-ffn-hidden-size": (c) => c.ffnHiddenSize,
	"vision-kv-channels": (c) => c.visionHiddenSize / c.visionNumAttentionHeads,
	"vision-ffn-hidden-size": (c) => 4 * c.visionHiddenSize,
	"vision-projection-ffn-hidden-size": (c) => 4 * projectorInput(c),
	"encoder-balance": (c) => (c.mimoEncoderPrefetch || c.encoderPp > 1 ? "number" : "cost"),
	"tensor-parallel-num-weight-shards": (c) => c.llmTp,
	"expert-tensor-parallel-num-weight-shards": (c) => c.llmExptTp,
	"llm-dp": languageReplicas,
	"llm-offset": (c, { gpus } = unknownSurroundings) => defaultOffset(c, gpus),
	"global-batch-size": (c) => c.microBatchSize * dataLanes(c),
	"eval-global-batch-size": (c) => c.globalBatchSize,
	"eval-micro-batch-size": (c) => c.microBatchSize,
	"conversation-template": ({ chatTemplate, tokenizer }) =>
		chatTemplate !== null || (tokenizer !== null && chatTemplateFile(tokenizer) !== null) ? "jinja" : "plain",
	"dataset-provider": (c) => {
		const { dataPath } = c;
		if ((c.dataArgsPath ?? c.perSplitDataArgsPath ?? c.trainDataPath) !== null) return "indexed";
		if (dataPath === null) return "mock";
		if (dataPath.endsWith(".safetensors")) return "tokens";
		// Opening a file of another format as Energon data gives an error that names the format. A model with an encoder is
		// trained on text alone only with dataset-provider text.
		using _ = new ReadGuard(1000 * c.dataTimeout);
		if (watched(dataPath, () => isIndexedPath(dataPath))) return "indexed";
		return watched(dataPath, () => isEnergonPath(dataPath) || fileKind(dataPath) !== null) || hasEncoder(c)
			? "energon"
			: "text";
	},
};

/** Steps of a whole training. */
export function plannedIterations(
	c: Pick<TrainingConfiguration, "trainIters" | "trainSamples" | "globalBatchSize">,
): number {
	return c.trainIters ?? Math.floor(c.trainSamples! / c.globalBatchSize);
}
