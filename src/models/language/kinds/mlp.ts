/** The dense MLP layer, and the two projections that it shares with shared experts (docs/spec/language-model.md §4.1). */
import { hasGatedActivation } from "../../../config/derive.ts";
import type { TrainingConfiguration } from "../../../config/schema.ts";
import { isGatedActivation } from "../../../native/activations.ts";
import { reduceScatterSequence, type Shard } from "../../../parallel/index.ts";
import { activation, type ResidualSum, type Tape, type Tensor } from "../../../tensor/index.ts";
import type { ParameterSpec } from "../../parameter-spec.ts";
import type { HybridConfig } from "../config.ts";
import type { LayerContext } from "../layer-context.ts";
import { addOutputBias, project } from "../projection.ts";
import { everyRanksTokens, normed, runModule } from "../recomputed-module.ts";
import { biases, columns, distributions, hiddenNorm, type Kind, postNorm, replicated, rows } from "./kind.ts";

const behind = "mlp.linear_fc2.post_layernorm.weight";

export const mlp: Kind = {
	title: "MLP",
	scopes: ["mlp", "pre_mlp_layernorm"],
	routes: false,
	parameters: (config) => [
		...hiddenNorm(config, "mlp.linear_fc1.layer_norm_weight"),
		...feedForwardParameters(config, "mlp.", config.mlp.ffnHiddenSize),
		...postNorm(config, behind),
	],
	postNorm: behind,
	forward,
	flops: (c) => feedForwardFlops(c, c.ffnHiddenSize),
	megatronFlops: (c, tokens) => 4 * tokens * c.hiddenSize * c.ffnHiddenSize * (hasGatedActivation(c) ? 1.5 : 1),
	ownSizes: () => ({}),
};

/**
 * Sharding of fc1: gated, it holds the gate half and the linear half, or alternating runs of both; each half is sharded on its
 * own.
 */
function firstLayerShard(config: HybridConfig, width: number, interleave: number): Shard {
	if (!isGatedActivation(config.mlp.activation)) return rows;
	return { kind: "split", dimension: 0, blocks: [width, width], ...(interleave > 0 && { interleave }) };
}

/** The two projections named `prefix`…, of `width` channels; fc1's gate and linear rows alternate in runs of `interleave`. */
export function feedForwardParameters(
	config: HybridConfig,
	prefix: string,
	width: number,
	interleave = 0,
): ParameterSpec[] {
	const { inward, outward } = distributions(config);
	const h = config.hiddenSize;
	const firstRows = isGatedActivation(config.mlp.activation) ? 2 * width : width;
	const shard = firstLayerShard(config, width, interleave);
	return [
		{ name: `${prefix}linear_fc1.weight`, shape: [firstRows, h], initialisation: inward, shard },
		...biases(config, `${prefix}linear_fc1.bias`, firstRows, shard),
		{ name: `${prefix}linear_fc2.weight`, shape: [h, width], initialisation: outward, shard: columns },
		...biases(config, `${prefix}linear_fc2.bias`, h, replicated),
	];
}

/** The weight of each token's channels from all tokens' u_TH, f32 [T]. */
type TokenWeights = (tape: Tape, context: LayerContext, u: Tensor) => Tensor;

/**
 * fc2(act(fc1(u))) with the projections named `prefix`…; u_TH and the result are this rank's tokens. `weigh`: times its weights;
 * default: 1.
 */
export function feedForward(
	tape: Tape,
	context: LayerContext,
	u: Tensor,
	prefix: string,
	weigh: TokenWeights | null = null,
): Tensor {
	using activated = enterFeedForward(tape, context, u, prefix, weigh);
	return leaveFeedForward(tape, context, activated, prefix);
}

/** The first half of feedForward: act(fc1(u)) of all tokens, this rank's part of the channels. */
export function enterFeedForward(
	tape: Tape,
	context: LayerContext,
	u: Tensor,
	prefix: string,
	weigh: TokenWeights | null = null,
): Tensor {
	using everyToken = everyRanksTokens(tape, context, u);
	using hidden = project(tape, context, everyToken.y, `${prefix}linear_fc1.weight`);
	using rowProbability = weigh?.(tape, context, everyToken.y) ?? null;
	everyToken.drop();
	if (tape.recording) context.probe("preactivation")?.(hidden);
	const { activation: kind, clamp, linearOffset } = context.config.mlp;
	return activation(tape, hidden, kind, { clamp, linearOffset, rowProbability });
}

/** The second half of feedForward: fc2 of the activated channels, this rank's tokens. */
export function leaveFeedForward(tape: Tape, context: LayerContext, activated: Tensor, prefix: string): Tensor {
	const { tp } = context.parallel;
	const second = `${prefix}linear_fc2.weight`;
	using partial = project(tape, context, activated, second);
	return addOutputBias(tape, context, reduceScatterSequence(tape, partial, tp), second);
}

/** x_TH → mlp(rms(x_TH)), without the residual. */
function forward(tape: Tape, context: LayerContext, x: ResidualSum): Tensor {
	using u = normed(tape, context, x, "mlp.linear_fc1.layer_norm_weight");
	using y = runModule(tape, context.config, "mlp", [u.y], (on, value) => feedForward(on, context, value, "mlp."));
	u.drop();
	return y.y.share();
}

/** Forward FLOPs of a token in two projections of `width` channels; a gated activation has a third. */
export function feedForwardFlops(c: TrainingConfiguration, width: number): number {
	return 2 * (hasGatedActivation(c) ? 3 : 2) * c.hiddenSize * width;
}
