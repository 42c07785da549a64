/** The dense MLP layer, and the two projections that it shares with shared experts (docs/spec/language-model.md §4.1). */
import { reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import { activation } from "../../tensor/ops/activation.ts";
import type { ResidualSum } from "../../tensor/residual-sum.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { LayerContext } from "./layer-context.ts";
import { addOutputBias, project } from "./projection.ts";
import { everyRanksTokens, normed, runModule } from "./recomputed-module.ts";

/** fc2(act(fc1(u))) with the projections named `prefix`…; u_TH and the result are this rank's tokens. */
export function feedForward(tape: Tape, context: LayerContext, u: Tensor, prefix: string): Tensor {
	using activated = enterFeedForward(tape, context, u, prefix);
	return leaveFeedForward(tape, context, activated, prefix);
}

/** The first half of feedForward: act(fc1(u)) of all tokens, this rank's part of the channels. */
export function enterFeedForward(tape: Tape, context: LayerContext, u: Tensor, prefix: string): Tensor {
	using everyToken = everyRanksTokens(tape, context, u);
	using hidden = project(tape, context, everyToken.y, `${prefix}linear_fc1.weight`);
	everyToken.drop();
	if (tape.recording) context.probe("preactivation")?.(hidden);
	const { activation: kind, clamp, linearOffset } = context.config.mlp;
	return activation(tape, hidden, kind, { clamp, linearOffset });
}

/** The second half of feedForward: fc2 of the activated channels, this rank's tokens. */
export function leaveFeedForward(tape: Tape, context: LayerContext, activated: Tensor, prefix: string): Tensor {
	const { tp } = context.parallel;
	const second = `${prefix}linear_fc2.weight`;
	using partial = project(tape, context, activated, second);
	return addOutputBias(tape, context, reduceScatterSequence(tape, partial, tp), second);
}

/** x_TH → mlp(rms(x_TH)), without the residual. */
export function mlpLayer(tape: Tape, context: LayerContext, x: ResidualSum): Tensor {
	using u = normed(tape, context, x, "mlp.linear_fc1.layer_norm_weight");
	using y = runModule(tape, context.config, "mlp", [u.y], (on, value) => feedForward(on, context, value, "mlp."));
	u.drop();
	return y.y.share();
}
