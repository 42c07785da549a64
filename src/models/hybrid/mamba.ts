/**
 * A Mamba-2 layer (docs/spec/language-model.md §2.2): x_TH → mixer(rms(x_TH)), without the residual. Tensor parallelism shards
 * heads and groups, so nothing is communicated between the two projections.
 */
import { reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import { splitColumns } from "../../tensor/ops/split-columns.ts";
import type { ResidualSum } from "../../tensor/residual-sum.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import { mambaSizes } from "./config.ts";
import type { LayerContext } from "./layer-context.ts";
import { masked, maskedNorm } from "./masks.ts";
import { project } from "./projection.ts";
import { everyRanksTokens, normed, runModule } from "./recomputed-module.ts";

export function mambaLayer(tape: Tape, context: LayerContext, x: ResidualSum): Tensor {
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
