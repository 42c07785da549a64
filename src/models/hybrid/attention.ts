/**
 * A causal self-attention layer (docs/spec/language-model.md §3): x_TH → attention(rms(x_TH)), without the residual. Tensor
 * parallelism shards key-value heads with their query heads.
 */
import { reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import type { ResidualSum } from "../../tensor/residual-sum.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { TokenSlice } from "../../tensor/token-slice.ts";
import type { LayerContext } from "./layer-context.ts";
import { masked } from "./masks.ts";
import { addOutputBias, project } from "./projection.ts";
import { everyRanksTokens, normed, runModule } from "./recomputed-module.ts";

/** `dropout`: Philox key of this layer's mask, and the indices of the microbatch's tokens in the step. */
export function attentionLayer(
	tape: Tape,
	context: LayerContext,
	x: ResidualSum,
	dropout: { readonly seed: bigint; readonly tokens: TokenSlice },
): Tensor {
	const { config, sequences, mixing } = context;
	const { attention: shape } = config;
	const { tp } = context.parallel;
	using u = normed(tape, context, x, "self_attention.linear_qkv.layer_norm_weight");
	using everyToken = everyRanksTokens(tape, context, u.y);
	const masks = context.layerMasks?.attention;
	using everyHead = project(tape, context, everyToken.y, "self_attention.linear_qkv.weight");
	using projected = masked(tape, everyHead, masks?.projection);
	everyToken.drop();
	u.drop();
	const queryHeads = shape.heads / tp.size;
	const heads = { queryHeads, keyHeads: shape.queryGroups / tp.size, headDim: shape.headDim };
	using qkv = shape.rope ? mixing.rope(tape, projected, { ...heads, ...shape.rope, sequences }) : projected.share();
	using attended = runModule(tape, config, "core_attn", [qkv], (on, fused) => {
		using ofHeads = mixing.attention(on, fused, {
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
		return masked(on, ofHeads, masks?.attended);
	});
	context.probe("heads")?.(attended.y);
	const output = "self_attention.linear_proj.weight";
	using partial = project(tape, context, attended.y, output);
	attended.drop();
	return addOutputBias(tape, context, reduceScatterSequence(tape, partial, tp), output);
}
