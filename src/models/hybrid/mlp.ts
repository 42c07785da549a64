/**
 * Feed-forward pieces (docs/spec/language-model.md §4.1): the dense layer, and the two-projection block shared experts
 * use.
 */
import { gatherSequence, reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import { activation } from "../../tensor/ops/activation.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { LayerContext } from "./layer.ts";
import { project } from "./projection.ts";

/** fc2(act(fc1(u))) of the two projections named `prefix`…; u_TH and the result are this rank's tokens. */
export function feedForward(tape: Tape, context: LayerContext, u: Tensor, prefix: string): Tensor {
	const { tp } = context.parallel;
	using everyToken = gatherSequence(tape, u, tp);
	using hidden = project(tape, context, everyToken, `${prefix}linear_fc1.weight`);
	using activated = activation(tape, hidden, context.config.mlp.activation);
	using partial = project(tape, context, activated, `${prefix}linear_fc2.weight`);
	return reduceScatterSequence(tape, partial, tp);
}

/** x_TH → mlp(rms(x_TH)), without the residual. */
export function mlpLayer(tape: Tape, context: LayerContext, x: Tensor): Tensor {
	const { config, weights } = context;
	using u = rmsNorm(tape, x, weights("mlp.linear_fc1.layer_norm_weight"), config.normEpsilon);
	return feedForward(tape, context, u, "mlp.");
}
