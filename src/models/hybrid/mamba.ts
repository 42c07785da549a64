/**
 * One Mamba-2 layer (docs/spec/language-model.md §2.2): x_TH → mixer(rms(x_TH)), without the residual. Tensor
 * parallelism cuts heads and groups, so no data are exchanged between the two projections.
 */
import { gatherSequence, reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import { splitColumns } from "../../tensor/ops/split-columns.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import { mambaSizes } from "./config.ts";
import type { LayerContext } from "./layer.ts";
import { project } from "./projection.ts";

export function mambaLayer(tape: Tape, context: LayerContext, x: Tensor): Tensor {
	const { config, weights, sequences, mixing } = context;
	const { tp } = context.parallel;
	const mamba = { ...config.mamba, heads: config.mamba.heads / tp.size, groups: config.mamba.groups / tp.size };
	const { inner, convolution } = mambaSizes(mamba);
	using u = rmsNorm(tape, x, weights("mixer.in_proj.layer_norm_weight"), config.normEpsilon);
	using everyToken = gatherSequence(tape, u, tp);
	using zxBCdt = project(tape, context, everyToken, "mixer.in_proj.weight");
	const [z, xBC, dt] = splitColumns(tape, zxBCdt, [inner, convolution, mamba.heads]);
	using gate = z!;
	using beforeConvolution = xBC!;
	using step = dt!;
	using convolved = mixing.convolution(
		tape,
		beforeConvolution,
		weights("mixer.conv1d_weight"),
		weights("mixer.conv1d_bias"),
		sequences,
	);
	using scanned = mixing.scan(tape, {
		xBC: convolved,
		z: gate,
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
	using normed = rmsNorm(tape, scanned, weights("mixer.norm.weight"), mamba.gatedNormEpsilon, groupSize);
	using partial = project(tape, context, normed, "mixer.out_proj.weight");
	return reduceScatterSequence(tape, partial, tp);
}
