/** Descriptions of a model's parameters, from which their memory is made. */
import type { Shard } from "../parallel/index.ts";

/** Distribution of initial values (docs/spec/language-model.md §6.1). */
export type Initialisation =
	| { readonly kind: "normal"; readonly standardDeviation: number }
	| { readonly kind: "uniform"; readonly low: number; readonly high: number }
	| { readonly kind: "constant"; readonly value: number }
	/** log U(low, high): Mamba's A_log. */
	| { readonly kind: "log-uniform"; readonly low: number; readonly high: number }
	/** Inverse softplus of a step size drawn log-uniformly in [low, high] and at least `floor`: Mamba's dt_bias. */
	| { readonly kind: "inverse-softplus"; readonly low: number; readonly high: number; readonly floor: number };

export interface ParameterSpec {
	/** Megatron's logical name; of stacked experts without the expert's number. */
	readonly name: string;
	/** Unsharded shape; of stacked experts that of one expert. */
	readonly shape: readonly number[];
	/** Number of experts that are stacked into one tensor [experts, ...shape]; their names end in 0, 1, … */
	readonly experts?: number;
	readonly initialisation: Initialisation;
	readonly shard: Shard;
	/** Number of vocabulary rows without padding; padding rows are always zero. */
	readonly liveRows?: number;
	/** Marks a copy of a tensor that another pipeline stage holds too. Their gradients are summed; one of both is `counted`. */
	readonly copy?: { readonly counted: boolean };
	/** Whether it is fp32 even in bf16 training. */
	readonly alwaysF32?: boolean;
}

/** Whether weight decay applies; by Megatron's rule not to vectors and biases (docs/spec/language-model.md §7.2). */
export function decays(spec: ParameterSpec): boolean {
	return spec.shape.length > 1 && !spec.name.endsWith(".bias");
}

/** Unsharded shape without padding. */
export function logicalShape({ shape, liveRows }: ParameterSpec): readonly number[] {
	return liveRows === undefined ? shape : [liveRows, ...shape.slice(1)];
}

/** Full names of a spec's tensors: one, or one for each expert. */
export function logicalNames(spec: ParameterSpec): string[] {
	return spec.experts === undefined
		? [spec.name]
		: Array.from({ length: spec.experts }, (_, expert) => `${spec.name}${expert}`);
}
