/** Projects encoder features to the language model's width (docs/spec/vision.md §3): rows_R(in) → rows_RH, on each rank. */
import { columnParallelLinear, type Group, gatherColumns, type Shard } from "../../parallel/index.ts";
import { activation, type Parameter, rmsNorm, type Tape, type Tensor } from "../../tensor/index.ts";
import { adaptedColumns, adaptedRows, projectionOf } from "../adapted-linear.ts";
import { type LoraConfig, withAdapters } from "../lora.ts";
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
	/** mlp: adapters of its projections, beside weights that are frozen; null: none. */
	readonly lora: LoraConfig | null;
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
	const projections: ParameterSpec[] = [
		{ name: `${prefix}linear_fc1.weight`, shape: [ffnHiddenSize, inputSize], initialisation: inward, shard: rows },
		{ name: `${prefix}linear_fc2.weight`, shape: [outputSize, ffnHiddenSize], initialisation: outward, shard: columns },
	];
	return [...(config.normEpsilon === null ? [] : [norm]), ...withAdapters(projections, config.lora)];
}

/** affine: W x; mlp: W2 relu(W1 norm(x))². The result is equal on all tensor-parallel ranks. */
export function project(
	tape: Tape,
	config: ProjectorConfig,
	parameters: { get(name: string): Parameter },
	x: Tensor,
	tp: Group,
): Tensor {
	const parameter = (name: string) => parameters.get(`${projectorPrefix}encoder.${name}`);
	tape.begin("projector");
	if (config.type === "affine") {
		using part = columnParallelLinear(tape, x, parameter("weight"), null, tp);
		return gatherColumns(tape, part, tp);
	}
	using normed =
		config.normEpsilon === null
			? x.share()
			: rmsNorm(tape, x, parameter("linear_fc1.layer_norm_weight"), config.normEpsilon);
	const options = { lora: config.lora, bias: false };
	using hidden = adaptedColumns(tape, normed, projectionOf(parameter, "linear_fc1", options), tp);
	using activated = activation(tape, hidden, "squaredRelu");
	return adaptedRows(tape, activated, projectionOf(parameter, "linear_fc2", options), tp);
}
