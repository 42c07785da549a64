/**
 * A Gated DeltaNet layer (docs/spec/families.md §2.5): x_TH → mixer(rms(x_TH)), without the residual. Tensor parallelism shards key
 * heads with their value heads, so nothing is communicated between the two projections.
 */
import { valuesAt } from "../../../config/language-model.ts";
import type { TrainingConfiguration } from "../../../config/schema.ts";
import { reduceScatterSequence } from "../../../parallel/index.ts";
import { gated, type ResidualSum, rmsNorm, splitColumns, type Tape, type Tensor } from "../../../tensor/index.ts";
import type { Initialisation, ParameterSpec } from "../../parameter-spec.ts";
import { type HybridConfig, linearAttentionSizes } from "../config.ts";
import type { LayerContext } from "../layer-context.ts";
import { project } from "../projection.ts";
import { everyRanksTokens, normed, runModule } from "../recomputed-module.ts";
import { columns, distributions, hiddenNorm, type Kind, ones, replicated, rows } from "./kind.ts";

export const gdn: Kind = {
	title: "Gated DeltaNet",
	scopes: ["self_attention", "input_layernorm"],
	routes: false,
	parameters,
	forward,
	flops,
	megatronFlops,
	ownSizes: () => ({}),
};

function parameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, linearAttention } = config;
	const { valueHeads, valueDim, convKernel } = linearAttention;
	const { keys, values, convolution, projection } = linearAttentionSizes(linearAttention);
	const { inward, outward } = distributions(config);
	const bound = 1 / Math.sqrt(convKernel);
	const taps: Initialisation = { kind: "uniform", low: -bound, high: bound };
	return [
		...hiddenNorm(config, "self_attention.in_proj.layer_norm_weight"),
		{
			name: "self_attention.in_proj.weight",
			shape: [projection, h],
			initialisation: inward,
			shard: { kind: "split", dimension: 0, blocks: [keys, keys, values, values, valueHeads, valueHeads] },
		},
		{
			name: "self_attention.conv1d.weight",
			shape: [convolution, 1, convKernel],
			initialisation: taps,
			shard: { kind: "split", dimension: 0, blocks: [keys, keys, values] },
		},
		{
			name: "self_attention.dt_bias",
			shape: [valueHeads],
			initialisation: { kind: "inverse-softplus", low: 0.001, high: 0.1, floor: 1e-4 },
			shard: rows,
			alwaysF32: true,
		},
		{
			name: "self_attention.A_log",
			shape: [valueHeads],
			initialisation: { kind: "log-uniform", low: 1, high: 16 },
			shard: rows,
			alwaysF32: true,
		},
		// Never zero-centred.
		{ name: "self_attention.out_norm.weight", shape: [valueDim], initialisation: ones, shard: replicated },
		{ name: "self_attention.out_proj.weight", shape: [h, values], initialisation: outward, shard: columns },
	];
}

function forward(tape: Tape, context: LayerContext, x: ResidualSum): Tensor {
	const { config } = context;
	using u = normed(tape, context, x, "self_attention.in_proj.layer_norm_weight");
	using everyToken = everyRanksTokens(tape, context, u.y);
	using projected = project(tape, context, everyToken.y, "self_attention.in_proj.weight");
	everyToken.drop();
	u.drop();
	using inner = runModule(tape, config, "core_attn", [projected], (on, value) => mixTokens(on, context, value));
	context.probe("heads")?.(inner.y);
	using partial = project(tape, context, inner.y, "self_attention.out_proj.weight");
	inner.drop();
	return reduceScatterSequence(tape, partial, context.parallel.tp);
}

/** Everything between the projections, for this rank's heads: convolution, delta rule, norm, gate. */
function mixTokens(tape: Tape, context: LayerContext, projected: Tensor): Tensor {
	const { config, weights, sequences, mixing } = context;
	const { size } = context.parallel.tp;
	const whole = config.linearAttention;
	const own = { ...whole, keyHeads: whole.keyHeads / size, valueHeads: whole.valueHeads / size };
	const { values, convolution } = linearAttentionSizes(own);
	const [first, second, third] = splitColumns(tape, projected, [convolution, values, 2 * own.valueHeads]);
	using beforeConvolution = first!;
	using z = second!;
	using ba = third!;
	const taps = weights("self_attention.conv1d.weight");
	using qkv = mixing.convolution(tape, beforeConvolution, taps, null, sequences);
	using o = mixing.delta(tape, {
		...{ qkv, ba, sequences, ...own },
		...{ dtBias: weights("self_attention.dt_bias"), aLog: weights("self_attention.A_log") },
	});
	using normalised = rmsNorm(tape, o, weights("self_attention.out_norm.weight"), config.normEpsilon);
	return gated(tape, normalised, z, "silu");
}

/** The recurrence as the kernels compute it, in chunks of 64 tokens. */
function flops(c: TrainingConfiguration): number {
	const sizes = linearAttentionSizes(valuesAt("linearAttention.", c));
	const { linearKeyHeadDim: dk, linearValueHeadDim: dv, linearNumValueHeads: heads } = c;
	const projections = 2 * c.hiddenSize * (sizes.projection + sizes.values);
	const recurrence = 6 * dk * dv * heads + 64 * (4 * sizes.keys + 3 * sizes.values);
	return projections + 2 * c.linearConvKernelDim * sizes.convolution + recurrence;
}

function megatronFlops(c: TrainingConfiguration, tokens: number): number {
	const sizes = linearAttentionSizes(valuesAt("linearAttention.", c));
	const recurrence = 4 * c.linearNumValueHeads * c.linearValueHeadDim ** 2;
	const convolution = c.linearConvKernelDim * sizes.convolution;
	return 2 * tokens * (c.hiddenSize * (sizes.projection + sizes.values) + convolution + recurrence);
}
