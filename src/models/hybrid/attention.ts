/**
 * One causal self-attention layer (docs/spec/language-model.md §3): x_TH → attention(rms(x_TH)), without the residual.
 * Tensor parallelism cuts key heads with their query heads.
 */
import { gatherSequence, reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { TokenSlice } from "../../tensor/token-slice.ts";
import type { LayerContext } from "./layer.ts";
import { project } from "./projection.ts";

/** `dropout`: key of this layer's mask and the microbatch's tokens among those of the step. */
export function attentionLayer(
	tape: Tape,
	context: LayerContext,
	x: Tensor,
	dropout: { readonly seed: bigint; readonly tokens: TokenSlice },
): Tensor {
	const { config, weights, sequences, mixing } = context;
	const { attention: shape } = config;
	const { tp } = context.parallel;
	using u = rmsNorm(tape, x, weights("self_attention.linear_qkv.layer_norm_weight"), config.normEpsilon);
	using everyToken = gatherSequence(tape, u, tp);
	using projected = project(tape, context, everyToken, "self_attention.linear_qkv.weight");
	const queryHeads = shape.heads / tp.size;
	const heads = { queryHeads, keyHeads: shape.queryGroups / tp.size, headDim: shape.headDim };
	using qkv = shape.rope ? mixing.rope(tape, projected, { ...heads, ...shape.rope, sequences }) : projected.share();
	using attended = mixing.attention(tape, qkv, {
		...heads,
		sequences,
		mask: "causal",
		softmaxScale: shape.softmaxScale,
		dropout: tape.training ? shape.dropout : 0,
		dropoutSeed: dropout.seed,
		firstToken: dropout.tokens.first,
		firstHead: tp.rank * queryHeads,
		fullHeads: shape.heads,
	});
	using partial = project(tape, context, attended, "self_attention.linear_proj.weight");
	return reduceScatterSequence(tape, partial, tp);
}
