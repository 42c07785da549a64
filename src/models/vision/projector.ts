/** Projects encoder features to the language model's width (docs/spec/vision.md §3): rows_R(in) → rows_RH, on each rank. */
import type { Group } from "../../parallel/group.ts";
import type { Shard } from "../../parallel/shard.ts";
import { columnParallelLinear, gatherColumns, rowParallelLinear } from "../../parallel/tensor-parallel.ts";
import { activation } from "../../tensor/ops/activation.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import type { Parameter } from "../../tensor/parameter.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { Initialisation, ParameterSpec } from "../parameter-spec.ts";

export interface ProjectorConfig {
	readonly type: "affine" | "mlp";
	readonly inputSize: number;
	readonly outputSize: number;
	/** mlp: hidden width. */
	readonly ffnHiddenSize: number;
	/** mlp: epsilon of an RMS norm before the first projection; null: no norm, as in MIMO. */
	readonly normEpsilon: number | null;
	readonly initMethodStd: number;
	/** mlp: standard deviation of the second projection's initial values. */
	readonly outputInitMethodStd: number;
}

export const projectorPrefix = "modality_submodules.radio_encoder.input_projections.0.";

const rows: Shard = { kind: "split", dimension: 0 };
const columns: Shard = { kind: "split", dimension: 1 };

export function projectorParameters(config: ProjectorConfig): ParameterSpec[] {
	const { inputSize, outputSize, ffnHiddenSize } = config;
	const prefix = `${projectorPrefix}encoder.`;
	const inward: Initialisation = { kind: "normal", standardDeviation: config.initMethodStd };
	if (config.type === "affine") {
		return [{ name: `${prefix}weight`, shape: [outputSize, inputSize], initialisation: inward, shard: rows }];
	}
	const outward: Initialisation = { kind: "normal", standardDeviation: config.outputInitMethodStd };
	const norm: ParameterSpec = {
		name: `${prefix}linear_fc1.layer_norm_weight`,
		shape: [inputSize],
		initialisation: { kind: "constant", value: 1 },
		shard: { kind: "replicated" },
	};
	return [
		...(config.normEpsilon === null ? [] : [norm]),
		{ name: `${prefix}linear_fc1.weight`, shape: [ffnHiddenSize, inputSize], initialisation: inward, shard: rows },
		{ name: `${prefix}linear_fc2.weight`, shape: [outputSize, ffnHiddenSize], initialisation: outward, shard: columns },
	];
}

/** affine: W x; mlp: W2 relu(W1 norm(x))². The result is equal on all tensor-parallel ranks. */
export function project(
	tape: Tape,
	config: ProjectorConfig,
	parameters: { get(name: string): Parameter },
	x: Tensor,
	tp: Group,
): Tensor {
	const weight = (name: string) => parameters.get(`${projectorPrefix}encoder.${name}`);
	tape.begin("projector");
	if (config.type === "affine") {
		using part = columnParallelLinear(tape, x, weight("weight"), null, tp);
		return gatherColumns(tape, part, tp);
	}
	using normed =
		config.normEpsilon === null
			? x.share()
			: rmsNorm(tape, x, weight("linear_fc1.layer_norm_weight"), config.normEpsilon);
	using hidden = columnParallelLinear(tape, normed, weight("linear_fc1.weight"), null, tp);
	using activated = activation(tape, hidden, "squaredRelu");
	return rowParallelLinear(tape, activated, weight("linear_fc2.weight"), null, tp);
}
