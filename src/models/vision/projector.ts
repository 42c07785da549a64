/** Projects encoder features to the language model's width (docs/spec/vision.md §3): rows_R(in) → rows_RH, on each rank. */
import { columnParallelLinear, type Group, gatherColumns, type Shard } from "../../parallel/index.ts";
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
	/** mlp: linear layers in → out → out with a LayerNorm and GELU behind them, before the first projection; it has no other norm then. */
	readonly stem: boolean;
	/** mlp: between the projections. */
	readonly activation: "squaredRelu" | "geluErf" | "swiglu";
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
	stem: false,
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
	const matrix = (name: string, shape: readonly [number, number], initialisation = inward, shard: Shard = rows) => {
		return { name: `${prefix}${name}.weight`, shape, initialisation, shard };
	};
	const norm = [
		constant("linear_fc1.layer_norm_weight", inputSize, 1),
		...(config.normalization === "LayerNorm" ? [constant("linear_fc1.layer_norm_bias", inputSize, 0)] : []),
	];
	const stem = [
		matrix("stem.linear_in", [outputSize, inputSize]),
		constant("stem.linear_in.bias", outputSize, 0, rows),
		matrix("stem.linear_proj", [outputSize, outputSize]),
		constant("stem.layer_norm_weight", outputSize, 1),
		constant("stem.layer_norm_bias", outputSize, 0),
	];
	const bias = (...spec: Parameters<typeof constant>) => (config.bias ? [constant(...spec)] : []);
	// The gate's half, then the linear one.
	const gated: Shard = { kind: "split", dimension: 0, blocks: [ffnHiddenSize, ffnHiddenSize] };
	const [first, shard] = config.activation === "swiglu" ? [2 * ffnHiddenSize, gated] : [ffnHiddenSize, rows];
	const projections: ParameterSpec[] = [
		matrix("linear_fc1", [first, config.stem ? outputSize : inputSize], inward, shard),
		...bias("linear_fc1.bias", first, 0, shard),
		matrix("linear_fc2", [outputSize, ffnHiddenSize], outward, columns),
		...bias("linear_fc2.bias", outputSize, 0),
	];
	const before = config.stem ? stem : config.normEpsilon === null ? [] : norm;
	return [...before, ...withAdapters(projections, config.lora)];
}

/**
 * affine: W x; mlp: W2 f(W1 norm(x) + b1) + b2, f(x) = relu(x)², gelu(x) or of both halves of x silu(gate) ⊙ x. The result is equal on
 * all tensor-parallel ranks.
 */
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
	using normed = config.stem ? stemOf(tape, x, parameter, tp) : normOf(tape, config, x, parameter);
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

/** PyTorch's epsilon of a LayerNorm, which the class of GLM-4.5V's merger takes. */
const stemEpsilon = 1e-5;

/** gelu(norm(P (D x + d))). */
function stemOf(tape: Tape, x: Tensor, parameter: (name: string) => Parameter, tp: Group): Tensor {
	const whole = (input: Tensor, name: string, bias: Parameter | null) => {
		using part = columnParallelLinear(tape, input, parameter(`stem.${name}.weight`), bias, tp);
		return gatherColumns(tape, part, tp);
	};
	using entered = whole(x, "linear_in", parameter("stem.linear_in.bias"));
	using projected = whole(entered, "linear_proj", null);
	const [weight, bias] = [parameter("stem.layer_norm_weight"), parameter("stem.layer_norm_bias")];
	using normed = layerNorm(tape, projected, weight, bias, stemEpsilon);
	return activation(tape, normed, "geluErf");
}
