/** Projects encoder features to the language model's width (docs/spec/vision.md §3): rows_R(in) → rows_RH, on each rank. */
import { columnParallelLinear, gatherColumns, type Shard } from "../../parallel/index.ts";
import {
	activation,
	joinColumns,
	layerNorm,
	type Parameter,
	rmsNorm,
	splitColumns,
	type Tape,
	type Tensor,
} from "../../tensor/index.ts";
import { adaptedColumns, adaptedRows, projectionOf } from "../adapted-linear.ts";
import { type LoraConfig, withAdapters } from "../lora.ts";
import type { Initialisation, ParameterSpec } from "../parameter-spec.ts";
import type { EncoderObserver, TowerPlace } from "../tower.ts";

export interface ProjectorConfig {
	readonly type: "affine" | "mlp";
	readonly inputSize: number;
	readonly outputSize: number;
	/** mlp: hidden width. */
	readonly ffnHiddenSize: number;
	/** mlp: epsilon of a norm before the first projection; null: no norm, as in MIMO. */
	readonly normEpsilon: number | null;
	/** mlp: the norm, whose LayerNorm has a bias. */
	readonly normalization: "RMSNorm" | "LayerNorm";
	/** mlp: between the projections. */
	readonly activation: "squaredRelu" | "geluErf";
	/** mlp: whether its projections have biases. */
	readonly bias: boolean;
	readonly initMethodStd: number;
	/** mlp: standard deviation of the second projection's initial values. */
	readonly outputInitMethodStd: number;
	/** mlp: further projectors of the tower's taps, each with a LayerNorm of this epsilon (DeepStack). */
	readonly deepstack: { readonly count: number; readonly normEpsilon: number };
	/** mlp: adapters of its projections, beside weights that are frozen; null: none. */
	readonly lora: LoraConfig | null;
	/** A learned row behind pictures and their lines (pictures.ts). */
	readonly newline: boolean;
}

/** Without a norm, as in MIMO. */
export const plainProjector = {
	normEpsilon: null,
	normalization: "RMSNorm",
	activation: "squaredRelu",
	bias: false,
	deepstack: { count: 0, normEpsilon: 0 },
	newline: false,
} as const satisfies Partial<ProjectorConfig>;

/** A projector without norm and adapters. `inner`: width of its hidden layer; null: it is one linear layer. */
export function newProjector({
	inner,
	...sizes
}: Pick<ProjectorConfig, "inputSize" | "outputSize" | "initMethodStd"> & {
	readonly inner: number | null;
}): ProjectorConfig {
	const type = inner === null ? "affine" : "mlp";
	const outputInitMethodStd = sizes.initMethodStd;
	return { ...plainProjector, ...sizes, type, ffnHiddenSize: inner ?? 0, outputInitMethodStd, lora: null };
}

/** Prefix of the projector's names of an encoder. */
function projectorPrefix(encoder: string): string {
	return `modality_submodules.${encoder}.input_projections.0.encoder.`;
}

const rows: Shard = { kind: "split", dimension: 0 };
const columns: Shard = { kind: "split", dimension: 1 };

/** The projector of tap `index`, from 0, and the beginning of its parameters' names. */
function deepProjector(config: ProjectorConfig, prefix: string, index: number): [string, ProjectorConfig] {
	const { normEpsilon } = config.deepstack;
	return [`${prefix}deepstack.${index}.`, { ...config, normEpsilon, normalization: "LayerNorm" }];
}

/** Width of a row that goes to the language model. */
export function rowWidth({ outputSize, deepstack }: ProjectorConfig): number {
	return outputSize * (1 + deepstack.count);
}

/** `encoder`: its name. */
export function projectorParameters(config: ProjectorConfig, encoder: string): ParameterSpec[] {
	const prefix = projectorPrefix(encoder);
	const deep = Array.from({ length: config.deepstack.count }, (_, index) => deepProjector(config, prefix, index));
	const newline: ParameterSpec = {
		name: newlineName(encoder),
		shape: [config.outputSize],
		initialisation: { kind: "normal", standardDeviation: config.outputSize ** -0.5 },
		shard: { kind: "replicated" },
	};
	return [
		...[parametersOf(prefix, config), ...deep.map((one) => parametersOf(...one))].flat(),
		...(config.newline ? [newline] : []),
	];
}

/** The learned row behind an encoder's pictures. */
export function newlineName(encoder: string): string {
	return `${projectorPrefix(encoder)}image_newline`;
}

function parametersOf(prefix: string, config: ProjectorConfig): ParameterSpec[] {
	const { inputSize, outputSize, ffnHiddenSize } = config;
	const inward: Initialisation = { kind: "normal", standardDeviation: config.initMethodStd };
	if (config.type === "affine") {
		return [{ name: `${prefix}weight`, shape: [outputSize, inputSize], initialisation: inward, shard: rows }];
	}
	const outward: Initialisation = { kind: "normal", standardDeviation: config.outputInitMethodStd };
	const replicated: Shard = { kind: "replicated" };
	const constant = (name: string, size: number, value: number, shard: Shard = replicated): ParameterSpec => {
		return { name: prefix + name, shape: [size], initialisation: { kind: "constant", value }, shard };
	};
	const norm = [
		constant("linear_fc1.layer_norm_weight", inputSize, 1),
		...(config.normalization === "LayerNorm" ? [constant("linear_fc1.layer_norm_bias", inputSize, 0)] : []),
	];
	const bias = (...spec: Parameters<typeof constant>) => (config.bias ? [constant(...spec)] : []);
	const projections: ParameterSpec[] = [
		{ name: `${prefix}linear_fc1.weight`, shape: [ffnHiddenSize, inputSize], initialisation: inward, shard: rows },
		...bias("linear_fc1.bias", ffnHiddenSize, 0, rows),
		{ name: `${prefix}linear_fc2.weight`, shape: [outputSize, ffnHiddenSize], initialisation: outward, shard: columns },
		...bias("linear_fc2.bias", outputSize, 0),
	];
	return [...(config.normEpsilon === null ? [] : norm), ...withAdapters(projections, config.lora)];
}

/** affine: W x; mlp: W2 f(W1 norm(x) + b1) + b2, f(x) = relu(x)² or gelu(x). The result is equal on all tensor-parallel ranks. */
export function project(
	tape: Tape,
	{ name: encoder, projector: config }: { readonly name: string; readonly projector: ProjectorConfig },
	place: Pick<TowerPlace, "parameters" | "tp">,
	x: Tensor,
	observe?: EncoderObserver,
): Tensor {
	const prefix = projectorPrefix(encoder);
	tape.begin("projector");
	const { count } = config.deepstack;
	using own = new DisposableStack();
	const windows = count === 0 ? [x] : splitColumns(tape, x, new Array<number>(count + 1).fill(config.inputSize));
	const parts = windows.map((window, part) => {
		if (count === 0) return own.use(projectOne(tape, prefix, config, place, window));
		using _window = window;
		using rows = joinColumns(tape, [window]);
		const one = part === 0 ? ([prefix, config] as const) : deepProjector(config, prefix, part - 1);
		const projected = own.use(projectOne(tape, ...one, place, rows));
		if (part > 0) observe?.(`deepstack.${part - 1}`, projected);
		return projected;
	});
	observe?.("projector", parts[0]!);
	return count === 0 ? parts[0]!.share() : joinColumns(tape, parts);
}

function projectOne(
	tape: Tape,
	prefix: string,
	config: ProjectorConfig,
	{ parameters, tp }: Pick<TowerPlace, "parameters" | "tp">,
	x: Tensor,
): Tensor {
	const parameter = (name: string) => parameters.get(prefix + name);
	if (config.type === "affine") {
		using part = columnParallelLinear(tape, x, parameter("weight"), null, tp);
		return gatherColumns(tape, part, tp);
	}
	using normed = normOf(tape, config, x, parameter);
	const { lora, bias } = config;
	using hidden = adaptedColumns(tape, normed, projectionOf(parameter, "linear_fc1", { lora, bias }), tp);
	using activated = activation(tape, hidden, config.activation);
	return adaptedRows(tape, activated, projectionOf(parameter, "linear_fc2", { lora, bias }), tp);
}

function normOf(tape: Tape, config: ProjectorConfig, x: Tensor, parameter: (name: string) => Parameter): Tensor {
	const { normEpsilon: epsilon, normalization } = config;
	if (epsilon === null) return x.share();
	const weight = parameter("linear_fc1.layer_norm_weight");
	if (normalization === "RMSNorm") return rmsNorm(tape, x, weight, epsilon);
	return layerNorm(tape, x, weight, parameter("linear_fc1.layer_norm_bias"), epsilon);
}
