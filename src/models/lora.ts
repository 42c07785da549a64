/**
 * Low-rank adapters (Hu et al., LoRA): beside a frozen projection W_OI train a_RI and b_OR, and W + (α / r) b a replaces W. Both
 * are sharded as W is, so that an adapter adds no communication: with W's rows sharded, b has the same rows and a is replicated;
 * with W's columns sharded, a has the same columns and b is replicated, and the partial products add up where the projection's
 * do.
 */
import type { LoraModule, VisionLoraModule } from "../config/keys/lora.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { Initialisation, ParameterSpec } from "./parameter-spec.ts";

export interface LoraConfig {
	readonly rank: number;
	readonly alpha: number;
	/** Dropout probability of the input of a. */
	readonly dropout: number;
	/** Projections with an adapter, without the name of their part of the model. */
	readonly targets: readonly string[];
	/**
	 * Initial b: zero, so that an adapter starts as no change, or drawn (`mimo verify`), so that no gradient is zero by
	 * definition.
	 */
	readonly start: "zero" | "drawn";
}

export type LoraKeys = Pick<TrainingConfiguration, "loraAlpha" | "loraDropout" | "loraRank" | "loraTargetModules">;

/** Parts of the encoder that may have adapters, as targets name them. */
export type VisionPart = VisionLoraModule extends `${infer Part}.${string}` ? Part : never;

/** Adapters of the language model; null: no rank is given. Without a target of its own it is frozen as a whole. */
export function languageLora(c: LoraKeys): LoraConfig | null {
	return loraOf(
		c,
		c.loraTargetModules.filter((module) => !/^vision_/.test(module)),
	);
}

/** Adapters of a part of the encoder; null: none of its projections is a target, and the part is as without adapters. */
export function visionLora(c: LoraKeys, part: VisionPart): LoraConfig | null {
	const own = c.loraTargetModules.filter((module) => module.startsWith(`${part}.`));
	return own.length === 0
		? null
		: loraOf(
				c,
				own.map((module: LoraModule) => module.slice(part.length + 1)),
			);
}

function loraOf({ loraRank, loraAlpha, loraDropout }: LoraKeys, targets: readonly string[]): LoraConfig | null {
	if (loraRank === null) return null;
	return { rank: loraRank, alpha: loraAlpha, dropout: loraDropout, targets, start: "zero" };
}

/** Megatron-Bridge's names of the matrices, which replace ".weight". */
const matrices = { a: ".adapter.linear_in.weight", b: ".adapter.linear_out.weight" } as const;
export type AdapterMatrix = keyof typeof matrices;

/** Whether a tensor's full name is of an adapter. */
export function isAdapterName(name: string): boolean {
	return /\.adapter\.linear_(in|out)\.weight\d*$/.test(name);
}

/** Name of an adapter's matrix from its weight's name; an expert's number stays at the end. */
export function adapterName(weight: string, matrix: AdapterMatrix): string {
	return weight.replace(/\.weight(\d*)$/, `${matrices[matrix]}$1`);
}

/** Name of the weight that an adapter's matrix belongs to. */
export function adaptedWeight(name: string): string {
	return name.replace(/\.adapter\.linear_(?:in|out)\.weight(\d*)$/, ".weight$1");
}

/** α / r. */
export function adapterScale({ rank, alpha }: Pick<LoraConfig, "rank" | "alpha">): number {
	return alpha / rank;
}

const target =
	/(?:^|\.)((?:experts\.)?(?:linear_qkv|linear_q_proj|linear_(?:q|kv)_(?:down|up)_proj|linear_proj|linear_fc1|linear_fc2|in_proj|out_proj))\.weight\d*$/;

/** Whether a weight of this name gets an adapter. */
export function isTarget({ targets }: LoraConfig, weight: string): boolean {
	const [, module] = target.exec(weight) ?? [];
	return targets.some((wanted) => wanted === module);
}

/** The module of --lora-target-modules that a weight belongs to; null: none. */
export function targetOf(weight: string): string | null {
	const [, module] = target.exec(weight) ?? [];
	const part = /\.(encoders|input_projections)\./.exec(weight)?.[1];
	if (module === undefined || part === undefined) return module ?? null;
	return `${part === "encoders" ? "vision_model" : "vision_projection"}.${module}`;
}

/** The model's parameters, each followed by those of its adapter. */
export function withAdapters(specs: readonly ParameterSpec[], lora: LoraConfig | null): ParameterSpec[] {
	if (lora === null) return [...specs];
	return specs.flatMap((spec) => (isTarget(lora, spec.name) ? [spec, ...adapterOf(spec, lora)] : [spec]));
}

/** PEFT's initial values: a is Kaiming-uniform with slope √5, which is U(−1/√I, 1/√I); b is zero. */
function adapterOf(spec: ParameterSpec, lora: LoraConfig): ParameterSpec[] {
	const { rank, start } = lora;
	const [outputs, inputs] = spec.shape as readonly [number, number];
	const bound = 1 / Math.sqrt(inputs);
	const rowsCut = spec.shard.kind === "split" && spec.shard.dimension === 0;
	const columnsCut = spec.shard.kind === "split" && spec.shard.dimension === 1;
	const experts = spec.experts === undefined ? {} : { experts: spec.experts };
	return [
		{
			name: adapterName(spec.name, "a"),
			shape: [rank, inputs],
			...experts,
			initialisation: { kind: "uniform", low: -bound, high: bound },
			shard: columnsCut ? spec.shard : { kind: "replicated" },
		},
		{
			name: adapterName(spec.name, "b"),
			shape: [outputs, rank],
			...experts,
			initialisation: start === "zero" ? { kind: "constant", value: 0 } : drawn(spec, lora, bound),
			shard: rowsCut ? spec.shard : { kind: "replicated" },
		},
	];
}

/** An initial b that makes (α / r) b a about as large as the weight, for a uniform in ±bound. */
function drawn({ name, initialisation }: ParameterSpec, lora: LoraConfig, bound: number): Initialisation {
	if (initialisation.kind !== "normal") throw new RangeError(`${name} is no projection.`);
	const deviationOfSum = Math.sqrt(lora.rank) * (bound / Math.sqrt(3));
	const standardDeviation = initialisation.standardDeviation / (adapterScale(lora) * deviationOfSum);
	return { kind: "normal", standardDeviation };
}
