/** Projects encoder features to the language model's width (docs/spec/vision.md §3): rows_R(in) → rows_RH, on each rank. */
import { columnParallelLinear, gatherColumns, type Shard } from "../../parallel/index.ts";
import { activation, rmsNorm, type Tape, type Tensor } from "../../tensor/index.ts";
import { adaptedColumns, adaptedRows, projectionOf } from "../adapted-linear.ts";
import { type LoraConfig, withAdapters } from "../lora.ts";
import type { Initialisation, ParameterSpec } from "../parameter-spec.ts";
import type { TowerPlace } from "../tower.ts";

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

/** A projector without norm and adapters. `inner`: width of its hidden layer; null: it is one linear layer. */
export function newProjector({
	inner,
	...sizes
}: Pick<ProjectorConfig, "inputSize" | "outputSize" | "initMethodStd"> & {
	readonly inner: number | null;
}): ProjectorConfig {
	const type = inner === null ? "affine" : "mlp";
	const outputInitMethodStd = sizes.initMethodStd;
	return { ...sizes, type, ffnHiddenSize: inner ?? 0, normEpsilon: null, outputInitMethodStd, lora: null };
}

/** Prefix of the projector's names of an encoder. */
function projectorPrefix(encoder: string): string {
	return `modality_submodules.${encoder}.input_projections.0.encoder.`;
}

const rows: Shard = { kind: "split", dimension: 0 };
const columns: Shard = { kind: "split", dimension: 1 };

/** `encoder`: its name. */
export function projectorParameters(config: ProjectorConfig, encoder: string): ParameterSpec[] {
	const { inputSize, outputSize, ffnHiddenSize } = config;
	const prefix = projectorPrefix(encoder);
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
	{ name: encoder, projector: config }: { readonly name: string; readonly projector: ProjectorConfig },
	{ parameters, tp }: Pick<TowerPlace, "parameters" | "tp">,
	x: Tensor,
): Tensor {
	const prefix = projectorPrefix(encoder);
	const parameter = (name: string) => parameters.get(prefix + name);
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
