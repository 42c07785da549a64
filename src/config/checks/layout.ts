/**
 * Checks of the layout of ranks (docs/spec/runtime.md §1.3): spans of modules, divisors of sizes, batches over data lanes.
 */
import { counted } from "../../system/counted.ts";
import { dealsHeads } from "../context-parallel.ts";
import {
	dataLanes,
	encoderRanks,
	hasEncoder,
	languageRanks,
	paddedVocabularySize,
	sharesRanks,
	weightShards,
} from "../derive.ts";
import {
	deepStackObjection,
	hasLayer,
	type LayerKind,
	parseHybridPattern,
	pipelineObjection,
	segmentLengths,
} from "../hybrid-pattern.ts";
import { moduleRanks } from "../modules.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, divides, unless } from "./check.ts";

/** The dimensions that a tensor-parallel size cuts, with their lengths, and whether the configuration uses them. */
type Cuts = (c: TrainingConfiguration) => readonly (readonly [name: string, length: number, used: boolean])[];

/** Checks that `key` divides every length; the message names the others. */
function cuts(key: Key, size: (c: TrainingConfiguration) => number, lengths: Cuts): Check {
	return (c) => {
		const uneven = lengths(c).filter(([, length, used]) => used && length % size(c) !== 0);
		const names = uneven.map(([name, length]) => `${name} (${length})`);
		return unless(names.length === 0, key, `allowed is a divisor of ${names.join(" and of ")}`);
	};
}

const has = (c: TrainingConfiguration, kind: LayerKind) => hasLayer(c.hybridLayerPattern, kind);

/** Whether one of two numbers is a multiple of the other. */
const nested = (a: number, b: number) => a % b === 0 || b % a === 0;

/** "rank 4", "ranks 4-7". */
const rankSpan = (begin: number, end: number) => (end - begin === 1 ? `rank ${begin}` : `ranks ${begin}-${end - 1}`);

/** The encoder starts at rank 0 and the language model follows it, without a shared or unused rank. */
const spansMeet: Check = (c) => {
	const others = moduleRanks(c);
	if (!hasEncoder(c)) {
		const why = others > 0 ? "the ranks of modules" : c.llmOnly ? "with llm-only" : "without an encoder";
		return unless(c.llmOffset === others, "llm-offset", `allowed is ${others}${others > 0 ? "," : ""} ${why}`);
	}
	if (sharesRanks(c)) return null;
	const end = encoderRanks(c) + others;
	const languageEnd = c.llmOffset + languageRanks(c);
	const trouble =
		c.llmOffset < end
			? `on ${rankSpan(c.llmOffset, Math.min(end, languageEnd))} both modules would run`
			: `on ${rankSpan(end, c.llmOffset)} no module would run`;
	return unless(
		c.llmOffset === end,
		"llm-offset",
		`allowed is encoder-tp × encoder-dp${c.encoderPp > 1 ? " × encoder-pp" : ""}${others > 0 ? " and the ranks of modules" : ""} (${end}), or ${others} where both modules have equally many ranks: ${trouble}`,
	);
};

/** Most ranks of a run, as in the native library (cuda/common/run/run_layout.h). */
export const mostRanks = 65_536;

const ranksAreFew: Check = (c) => {
	const ranks = c.llmOffset + languageRanks(c);
	return unless(
		ranks <= mostRanks,
		"llm-dp",
		`with it the run has ${counted(ranks, "rank")}, and at most ${mostRanks} are allowed`,
	);
};

/** Most microbatches of a data lane's step: a schedule lists every rank's actions on each. */
const mostMicrobatches = 65_536;

/** Checks the number of microbatches of a step or of an evaluation's round. */
const microbatchesAreFew =
	(batch: "globalBatchSize" | "evalGlobalBatchSize", size: "microBatchSize" | "evalMicroBatchSize", key: Key): Check =>
	(c) => {
		const count = Math.ceil(c[batch] / (c[size] * dataLanes(c)));
		return unless(
			count <= mostMicrobatches,
			key,
			`with it every data lane has ${counted(count, "microbatch", "microbatches")}, and at most ${mostMicrobatches} are allowed`,
		);
	};

/** "4 ranks of llm-tp × data lanes": those of a pipeline stage. */
const stageOf = (c: TrainingConfiguration) =>
	`${languageRanks(c) / c.llmPp} ranks of llm-tp × ${c.llmCp === 1 ? "" : "llm-cp × "}data lanes`;

/** llm-ep × llm-expt-tp has to divide the ranks of a pipeline stage. */
const expertsDivideStage: Check = (c) => {
	const stage = languageRanks(c) / c.llmPp;
	return unless(
		stage % (c.llmEp * c.llmExptTp) === 0,
		"llm-ep",
		`times llm-expt-tp (${c.llmExptTp}) it has to divide the ${stageOf(c)}`,
	);
};

const expertShardsDivideStage: Check = (c) => {
	const stage = languageRanks(c) / c.llmPp;
	const inner = c.llmEp * c.llmExptTp;
	return unless(
		stage % inner !== 0 || (stage / inner) % weightShards(c).expert === 0,
		"expert-tensor-parallel-num-weight-shards",
		`times llm-ep (${c.llmEp}) it has to divide the ${stageOf(c)}`,
	);
};

/** An expert-parallel group has to be within one node or fill several. */
const expertNodesAreEqual: Check = (c) => {
	const [group, node] = [c.llmEp * c.llmExptTp, c.moeHybridepRanksPerNvlinkDomain];
	const [less, more] = [Math.min(group, node), Math.max(group, node)];
	return unless(
		c.moeTokenDispatcherType !== "flex" ||
			group === 1 ||
			(more % less === 0 && c.llmOffset % less === 0 && node % c.llmExptTp === 0),
		"moe-hybridep-ranks-per-nvlink-domain",
		`allowed is a number that divides llm-ep × llm-expt-tp (${group}) and llm-offset (${c.llmOffset}), or a multiple of the first which the second is too; llm-expt-tp (${c.llmExptTp}) divides it`,
	);
};

/** The operations that sort and copy gathered rows have no bound on their number. */
const gatheringHasNoBound: Check = (c) =>
	unless(
		c.moeExpertCapacityBound === null || c.moeTokenDispatcherType !== "allgather",
		"moe-expert-capacity-bound",
		"moe-token-dispatcher-type allgather has room for all that can come, and no bound yet",
	);

/** Routes join whole lanes, so the numbers of lanes have to nest. */
const lanesNest: Check = (c) =>
	unless(
		!hasEncoder(c) || nested(c.encoderDp, dataLanes(c)),
		"encoder-dp",
		`allowed is a divisor or a multiple of the language model's data lanes (${dataLanes(c)})`,
	);

/** Heads of each kind of layer that mixes tokens, and the heads that several of them share. */
const sharedHeads = (c: TrainingConfiguration) =>
	[
		["num-attention-heads", c.numAttentionHeads, c.numQueryGroups, has(c, "attention")],
		["num-attention-heads", c.numAttentionHeads, c.numAttentionHeads, has(c, "latentAttention")],
		["mamba-num-heads", c.mambaNumHeads, c.mambaNumGroups, has(c, "mamba")],
		["linear-num-value-heads", c.linearNumValueHeads, c.linearNumKeyHeads, has(c, "gdn")],
	] as const;

/** Every context-parallel rank takes equally many heads of a tensor-parallel rank's, whole groups of them or equal parts of one. */
const contextDealsHeads: Check = (c) => {
	const uneven = sharedHeads(c).find(
		([, heads, groups, used]) => used && !dealsHeads({ heads: heads / c.llmTp, groups: groups / c.llmTp }, c.llmCp),
	);
	const [name, heads, groups] = uneven ?? [];
	return unless(
		uneven === undefined,
		"llm-cp",
		`allowed is a size that deals out the heads of a tensor-parallel rank evenly: ${name} is ${heads} in ${groups} groups, llm-tp ${c.llmTp}`,
	);
};

/** Features that do not run under context parallelism. */
const contextAlone: Check = (c) => {
	const others = [
		["flextron", c.flextron],
		["export-kd-teacher-load", c.exportKdTeacherLoad !== null],
		["self-distillation", c.selfDistillation],
		["eval-captions", c.evalCaptions > 0],
	] as const;
	const used = others.flatMap(([name, on]) => (on ? [name] : []));
	return unless(c.llmCp === 1 || used.length === 0, "llm-cp", `allowed is 1 with ${used.join(" and ")}`);
};

/** A rank's tokens of a microbatch: equally many, and as many as a convolution reads of the rank before. */
const contextCutsTokens: Check = (c) => {
	const tokens = c.microBatchSize * c.seqLength;
	const taps = [has(c, "mamba") ? c.mambaConvKernelDim : 1, has(c, "gdn") ? c.linearConvKernelDim : 1];
	const least = Math.max(...taps) - 1;
	return unless(
		c.llmCp === 1 || (tokens % (c.llmTp * c.llmCp) === 0 && tokens / c.llmCp >= least),
		"llm-cp",
		`times llm-tp it has to divide micro-batch-size × seq-length (${tokens}), and a rank needs at least ${counted(least, "token")}`,
	);
};

/** Checked before everything that reads the number of data lanes, which these make whole. */
export const weightShardChecks: readonly Check[] = [
	divides(
		"tensor-parallel-num-weight-shards",
		(c) => c.tensorParallelNumWeightShards,
		"llm-tp",
		(c) => c.llmTp,
	),
	divides(
		"expert-tensor-parallel-num-weight-shards",
		(c) => c.expertTensorParallelNumWeightShards,
		"llm-expt-tp",
		(c) => c.llmExptTp,
	),
];

/** Sharding sizes come last: refusing one skips every check that reads it. */
export const layoutChecks: readonly Check[] = [
	ranksAreFew,
	microbatchesAreFew("globalBatchSize", "microBatchSize", "global-batch-size"),
	(c) =>
		c.evalGlobalBatchSize === c.globalBatchSize
			? null
			: microbatchesAreFew("evalGlobalBatchSize", "evalMicroBatchSize", "eval-global-batch-size")(c),
	(c) => {
		const objection = pipelineObjection(c.hybridLayerPattern, c.llmPp);
		return unless(objection === null, "llm-pp", `allowed is ${objection}`);
	},
	(c) =>
		unless(
			c.microbatchGroupSizePerVirtualPipelineStage === null || c.microbatchGroupSizePerVirtualPipelineStage >= c.llmPp,
			"microbatch-group-size-per-virtual-pipeline-stage",
			`allowed is at least llm-pp (${c.llmPp})`,
		),
	(c) => unless(c.numExperts % c.llmEp === 0, "llm-ep", `allowed is a divisor of num-experts (${c.numExperts})`),
	expertsDivideStage,
	expertShardsDivideStage,
	spansMeet,
	lanesNest,
	(c) =>
		unless(
			!c.overlapMoeExpertParallelComm || (c.llmEp * c.llmExptTp > 1 && has(c, "moe")),
			"overlap-moe-expert-parallel-comm",
			"allowed only where experts (E) lie on several ranks: llm-ep or llm-expt-tp above 1",
		),
	expertNodesAreEqual,
	gatheringHasNoBound,
	(c) =>
		unless(
			!c.epOverlapEarlyAttnMemoryRelease || c.overlapMoeExpertParallelComm,
			"ep-overlap-early-attn-memory-release",
			"allowed only with overlap-moe-expert-parallel-comm",
		),
	(c) => unless(!c.encoderDdpOverlap || !c.llmOnly, "encoder-ddp-overlap", "allowed only without llm-only"),
	(c) =>
		unless(!c.encoderDdpOverlap || c.overlapGradReduce, "encoder-ddp-overlap", "allowed only with overlap-grad-reduce"),
	(c) =>
		unless(
			!c.overlapParamGather || c.overlapGradReduce,
			"overlap-param-gather",
			"allowed only with overlap-grad-reduce",
		),
	(c) =>
		unless(
			c.ddpNumBuckets === null || c.ddpBucketSize === null || c.ddpBucketSize === 0,
			"ddp-bucket-size",
			"allowed with ddp-num-buckets is 0",
		),
	cuts(
		"llm-tp",
		(c) => c.llmTp,
		(c) => [
			["num-attention-heads", c.numAttentionHeads, has(c, "attention") || has(c, "latentAttention")],
			["num-query-groups", c.numQueryGroups, has(c, "attention")],
			["mamba-num-heads", c.mambaNumHeads, has(c, "mamba")],
			["mamba-num-groups", c.mambaNumGroups, has(c, "mamba")],
			["linear-num-key-heads", c.linearNumKeyHeads, has(c, "gdn")],
			["ffn-hidden-size", c.ffnHiddenSize, has(c, "mlp")],
			["moe-shared-expert-intermediate-size", c.moeSharedExpertIntermediateSize, has(c, "moe")],
			["vocab-size padded to make-vocab-size-divisible-by", paddedVocabularySize(c), true],
			["micro-batch-size × seq-length", c.microBatchSize * c.seqLength, true],
			[
				"eval-micro-batch-size × seq-length",
				c.evalMicroBatchSize * c.seqLength,
				c.evalMicroBatchSize !== c.microBatchSize,
			],
		],
	),
	contextDealsHeads,
	contextAlone,
	contextCutsTokens,
	(c) =>
		unless(
			c.encoderPp === 1 || (hasEncoder(c) && !sharesRanks(c)),
			"encoder-pp",
			"allowed is 1 without an encoder on ranks of its own",
		),
	(c) =>
		unless(c.encoderPp === 1 || c.encoderBalance === "number", "encoder-pp", "above 1 it needs encoder-balance number"),
	(c) =>
		unless(
			c.encoderPp === 1 || (c.deepstackVisualIndexes ?? c.visionFeatureLayers) === null || c.classTokenLen === 0,
			"encoder-pp",
			"allowed with class tokens (--class-token-len) and deepstack-visual-indexes or vision-feature-layers is 1",
		),
	(c) => {
		const taps = hasEncoder(c) ? (c.deepstackVisualIndexes?.length ?? 0) : 0;
		if (taps === 0 || pipelineObjection(c.hybridLayerPattern, c.llmPp) !== null) return null;
		const [first] = segmentLengths(c.hybridLayerPattern, c.llmPp);
		const objection = deepStackObjection(parseHybridPattern(c.hybridLayerPattern), first!, taps);
		return unless(objection === null, "deepstack-visual-indexes", objection ?? "");
	},
	cuts(
		"encoder-pp",
		(c) => c.encoderPp,
		(c) => [["vision-num-layers", c.visionNumLayers, hasEncoder(c)]],
	),
	cuts(
		"encoder-tp",
		(c) => c.encoderTp,
		(c) => [
			["hidden-size", c.hiddenSize, hasEncoder(c) && (c.visionProjectionType === "affine" || c.visionProjectionStem)],
			[
				"vision-projection-ffn-hidden-size",
				c.visionProjectionFfnHiddenSize,
				hasEncoder(c) && c.visionProjectionType === "mlp",
			],
			["vision-hidden-size", c.visionHiddenSize, hasEncoder(c)],
			["vision-num-attention-heads", c.visionNumAttentionHeads, hasEncoder(c)],
			["vision-ffn-hidden-size", c.visionFfnHiddenSize, hasEncoder(c)],
		],
	),
	(c) =>
		unless(
			c.llmExptTp === 1 || c.moeMlpGluInterleaveSize === null,
			"moe-mlp-glu-interleave-size",
			`allowed only with llm-expt-tp 1, which is ${c.llmExptTp}`,
		),
	(c) =>
		unless(
			c.llmExptTp === 1 || !c.addBiasLinear || !has(c, "moe"),
			"llm-expt-tp",
			"allowed is 1 with add-bias-linear: the bias of an expert's output is not cut",
		),
	cuts(
		"llm-expt-tp",
		(c) => c.llmExptTp,
		(c) => [["moe-ffn-hidden-size", c.moeFfnHiddenSize, has(c, "moe")]],
	),
];
