/** The part of this folder that others use; they import nothing else of it, but for modules that are loaded when they are asked for. */

export type { ColumnMask, Mask, ScaleMask } from "./column-mask.ts";
export { GradientSlot } from "./gradient.ts";
export { activation } from "./ops/activation.ts";
export { add, addLater } from "./ops/add.ts";
export {
	type AttentionOptions,
	attention,
	attentionStep,
	type CachePlaces,
	type KeyValueCache,
} from "./ops/attention.ts";
export { type ChannelMask, causalConv1d, causalConv1dStep } from "./ops/causal-conv1d.ts";
export { joinColumns, reshape, splitColumns } from "./ops/columns.ts";
export { CrossEntropyStatistics, crossEntropy } from "./ops/cross-entropy.ts";
export { dropout } from "./ops/dropout.ts";
export { type E4m3Form, E4m3Rows } from "./ops/e4m3.ts";
export { linearInE4m3 } from "./ops/e4m3-linear.ts";
export { embedding } from "./ops/embedding.ts";
export { gated, splitGate } from "./ops/gate.ts";
export { type GatedDeltaInputs, gatedDelta, gatedDeltaStep, stateElements } from "./ops/gated-delta.ts";
export { addBias } from "./ops/grouped-bias.ts";
export { groupedLinear } from "./ops/grouped-linear.ts";
export { e4m3FormOf, groupedMlp } from "./ops/grouped-mlp.ts";
export { headNorm } from "./ops/head-norm.ts";
export { type HiddenLossName, hiddenLoss } from "./ops/hidden-loss.ts";
export { klDivergence, type TeacherLogits } from "./ops/kl-divergence.ts";
export { type LatentHeads, type LatentStep, latentAttentionStep, latentHeads } from "./ops/latent-attention.ts";
export { layerNorm } from "./ops/layer-norm.ts";
export { columnSum, gemm, type LinearOptions, linear } from "./ops/linear.ts";
export { addGroupedLowRank, addLowRank, addScaledProduct, type LowRank } from "./ops/low-rank.ts";
export {
	addMaskedColumns,
	addMaskedColumnsLater,
	addScaledColumns,
	maskColumns,
	maskScores,
	type ScoreMask,
} from "./ops/mask-columns.ts";
export { FactorSources } from "./ops/mask-factors.ts";
export { nodeExperts, tokenNodes } from "./ops/node-routing.ts";
export { ExpertOrder, type PermutedRows, permute, permuteRows, unpermute } from "./ops/permute.ts";
export { type RmsNormOptions, rmsNorm } from "./ops/rms-norm.ts";
export { rope, ropeLast } from "./ops/rope.ts";
export { balancingLoss, RouterStatistics, type Routing, route, updateExpertBias } from "./ops/router.ts";
export { sinkhornOffsets } from "./ops/sinkhorn.ts";
export { pickRows, SparseMatrix, type SparseOutline, type SparseRows, spmm } from "./ops/spmm.ts";
export { ssdScan, ssdStep } from "./ops/ssd.ts";
export { Parameter } from "./parameter.ts";
export { type Computation, offload, Recomputed, recompute } from "./recompute.ts";
export { ResidualSum } from "./residual-sum.ts";
export { Sequences, TokenSlice } from "./sequences.ts";
export { Tape, type TapeSegment, type WeightGradients } from "./tape.ts";
export {
	axpby,
	cast,
	contiguous,
	copyInto,
	dtypeBytes,
	elementCount,
	type FloatDtype,
	roundToBf16,
	Tensor,
} from "./tensor.ts";
