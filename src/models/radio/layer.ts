/**
 * One pre-norm layer of the RADIO tower (docs/spec/vision.md §1.5). Every tensor-parallel rank holds all tokens between
 * layers; inside it has its own heads and its own part of the feed-forward width.
 */
import type { Group } from "../../parallel/index.ts";
import {
	activation,
	addLater,
	attention,
	layerNorm,
	type Parameter,
	type ResidualSum,
	type Sequences,
	type Tape,
	Tensor,
} from "../../tensor/index.ts";
import { type AdaptedProjection, adaptedColumns, adaptedRows, projectionOf } from "../adapted-linear.ts";
import type { RadioConfig } from "./config.ts";

export interface RadioLayerContext {
	readonly config: RadioConfig;
	readonly tp: Group;
	/** A parameter of this layer by the end of its name, such as "mlp.linear_fc1.bias". */
	readonly weights: (name: string) => Parameter;
	/** Images with their class tokens. */
	readonly sequences: Sequences;
}

/** x_TC → x + attention(norm(x)), then that + mlp(norm(that)): a sum that the next norm may write. */
export function radioLayer(tape: Tape, context: RadioLayerContext, x: ResidualSum): ResidualSum {
	using attended = selfAttention(tape, context, x);
	using middle = addLater(tape, x.written(), attended);
	using fed = feedForward(tape, context, middle);
	return addLater(tape, middle.written(), fed);
}

/**
 * The norm and first projection of a branch: norm(x) Wᵀ + b of the linear layer named `name`, own part of its outputs. `gelu`
 * gets their GELU.
 */
function normedLinear(
	tape: Tape,
	context: RadioLayerContext,
	x: ResidualSum,
	name: string,
	gelu: Tensor | null = null,
): Tensor {
	const { config, tp, weights } = context;
	const [gamma, beta] = [weights(`${name}.layer_norm_weight`), weights(`${name}.layer_norm_bias`)];
	using normed = layerNorm(tape, x.tensor, gamma, beta, config.normEpsilon, { sum: x });
	return adaptedColumns(tape, normed, projection(context, name), tp, { gelu });
}

function projection({ config: { lora }, weights }: RadioLayerContext, name: string): AdaptedProjection {
	return projectionOf(weights, name, { lora, bias: true });
}

function selfAttention(tape: Tape, context: RadioLayerContext, x: ResidualSum): Tensor {
	const { config, tp, sequences } = context;
	using qkv = normedLinear(tape, context, x, "self_attention.linear_qkv");
	const heads = config.heads / tp.size;
	using attended = attention(tape, qkv, {
		queryHeads: heads,
		keyHeads: heads,
		headDim: config.headDim,
		sequences,
		mask: "full",
		softmaxScale: config.softmaxScale,
	});
	return adaptedRows(tape, attended, projection(context, "self_attention.linear_proj"), tp);
}

function feedForward(tape: Tape, context: RadioLayerContext, x: ResidualSum): Tensor {
	const { config, tp } = context;
	const inner = projection(context, "mlp.linear_fc1");
	const outer = projection(context, "mlp.linear_fc2");
	if (config.activation === "geluTanh" && inner.adapter === null && outer.adapter === null) {
		// Both products have the GELU in them.
		using activated = Tensor.empty(tape.device, [x.tensor.rows, outer.weight.value.width], x.tensor.dtype);
		using hidden = normedLinear(tape, context, x, "mlp.linear_fc1", activated);
		return adaptedRows(tape, activated, outer, tp, { geluOf: hidden });
	}
	using hidden = normedLinear(tape, context, x, "mlp.linear_fc1");
	using activated = activation(tape, hidden, config.activation);
	return adaptedRows(tape, activated, outer, tp);
}
