/**
 * A Mamba-2 layer (docs/spec/language-model.md §2.2): x_TH → mixer(rms(x_TH)), without the residual. Tensor parallelism shards
 * heads and groups, so nothing is communicated between the two projections.
 */
import type { TrainingConfiguration } from "../../../config/schema.ts";
import { reduceScatterSequence, type Shard } from "../../../parallel/index.ts";
import { type ResidualSum, splitColumns, type Tape, type Tensor } from "../../../tensor/index.ts";
import type { Initialisation, ParameterSpec } from "../../parameter-spec.ts";
import { type HybridConfig, mambaSizes } from "../config.ts";
import type { LayerContext } from "../layer-context.ts";
import { masked, maskedNorm } from "../masks.ts";
import { project } from "../projection.ts";
import { everyRanksTokens, normed, runModule } from "../recomputed-module.ts";
import { columns, distributions, hiddenNorm, type Kind, ones, rows } from "./kind.ts";

export const mamba: Kind = {
	title: "Mamba-2",
	scopes: ["mixer", "norm"],
	routes: false,
	parameters,
	forward,
	flops,
	megatronFlops,
	ownSizes: ({ mambaNumHeads }) => ({ mamba: { heads: mambaNumHeads } }),
};

function parameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, mamba } = config;
	const { inner, groupState, convolution, projection } = mambaSizes(mamba);
	const { inward, outward } = distributions(config);
	const bound = 1 / Math.sqrt(mamba.convKernel);
	const convolutionInit: Initialisation = { kind: "uniform", low: -bound, high: bound };
	const convolutionShard: Shard = { kind: "split", dimension: 0, blocks: [inner, groupState, groupState] };
	return [
		...hiddenNorm(config, "mixer.in_proj.layer_norm_weight"),
		{
			name: "mixer.in_proj.weight",
			shape: [projection, h],
			initialisation: inward,
			shard: { kind: "split", dimension: 0, blocks: [inner, inner, groupState, groupState, mamba.heads] },
			elementwise: true,
		},
		{
			name: "mixer.conv1d_weight",
			shape: [convolution, 1, mamba.convKernel],
			initialisation: convolutionInit,
			shard: convolutionShard,
		},
		{ name: "mixer.conv1d_bias", shape: [convolution], initialisation: convolutionInit, shard: convolutionShard },
		{
			name: "mixer.dt_bias",
			shape: [mamba.heads],
			initialisation: { kind: "inverse-softplus", low: 0.001, high: 0.1, floor: 1e-4 },
			shard: rows,
			alwaysF32: true,
		},
		{
			name: "mixer.A_log",
			shape: [mamba.heads],
			initialisation: { kind: "log-uniform", low: 1, high: 16 },
			shard: rows,
			alwaysF32: true,
		},
		{ name: "mixer.D", shape: [mamba.heads], initialisation: ones, shard: rows, alwaysF32: true },
		{ name: "mixer.norm.weight", shape: [inner], initialisation: ones, shard: rows },
		{ name: "mixer.out_proj.weight", shape: [h, inner], initialisation: outward, shard: columns },
	];
}

function forward(tape: Tape, context: LayerContext, x: ResidualSum): Tensor {
	const { config } = context;
	const { tp } = context.parallel;
	using u = normed(tape, context, x, "mixer.in_proj.layer_norm_weight");
	using everyToken = everyRanksTokens(tape, context, u.y);
	using zxBCdt = project(tape, context, everyToken.y, "mixer.in_proj.weight");
	everyToken.drop();
	u.drop();
	using inner = runModule(tape, config, "mamba", [zxBCdt], (on, projected) => mixTokens(on, context, projected));
	context.probe("heads")?.(inner.y);
	using partial = project(tape, context, inner.y, "mixer.out_proj.weight");
	inner.drop();
	return reduceScatterSequence(tape, partial, tp);
}

/** Everything between the projections, for this rank's heads: convolution, gated scan, norm. */
function mixTokens(tape: Tape, context: LayerContext, zxBCdt: Tensor): Tensor {
	const { config, weights, sequences, mixing } = context;
	const { tp } = context.parallel;
	const mamba = { ...config.mamba, heads: config.mamba.heads / tp.size, groups: config.mamba.groups / tp.size };
	const { inner, convolution } = mambaSizes(mamba);
	const masks = context.layerMasks?.mamba;
	const [z, xBC, dt] = splitColumns(tape, zxBCdt, [inner, convolution, mamba.heads]);
	using gate = z!;
	using beforeConvolution = xBC!;
	using everyStep = dt!;
	using step = masked(tape, everyStep, masks?.step);
	using convolved = mixing.convolution(
		tape,
		beforeConvolution,
		weights("mixer.conv1d_weight"),
		weights("mixer.conv1d_bias"),
		sequences,
		masks?.convolution,
	);
	using scanned = mixing.scan(tape, {
		xBC: convolved,
		z: gate,
		zMask: masks?.gate ?? null,
		dt: step,
		dtBias: weights("mixer.dt_bias"),
		aLog: weights("mixer.A_log"),
		d: weights("mixer.D"),
		sequences,
		heads: mamba.heads,
		headDim: mamba.headDim,
		groups: mamba.groups,
		stateDim: mamba.stateDim,
		chunkSize: mamba.chunkSize,
		dtMinimum: mamba.timeStepMinimum,
	});
	const groupSize = inner / mamba.groups;
	const { gatedNormEpsilon } = mamba;
	return maskedNorm(tape, scanned, weights("mixer.norm.weight"), gatedNormEpsilon, masks?.norm, { groupSize });
}

function flops(c: TrainingConfiguration): number {
	const { hiddenSize: h, mambaNumHeads: H, mambaHeadDim: P, mambaNumGroups: G, mambaStateDim: N } = c;
	const Q = c.mambaChunkSize;
	const projections = 2 * h * (2 * H * P + 2 * G * N + H) + 2 * H * P * h;
	const convolution = 2 * c.mambaConvKernelDim * (H * P + 2 * G * N);
	return projections + convolution + (2 * Q * N * G + 2 * Q * P * H + 4 * P * N * H);
}

/** d_inner = 2h whatever the heads are. */
function megatronFlops(c: TrainingConfiguration, tokens: number): number {
	const inner = 2 * c.hiddenSize;
	return (
		2 * tokens * c.hiddenSize * (2 * inner + 2 * c.mambaNumGroups * c.mambaStateDim + c.mambaNumHeads) +
		7 * tokens * inner * c.mambaStateDim +
		2 * tokens * inner * c.hiddenSize
	);
}
