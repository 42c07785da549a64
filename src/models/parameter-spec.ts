/** A model's description of its parameters before any memory exists. */
import type { Shard } from "../parallel/shard.ts";

/** The distribution of initial values (docs/spec/language-model.md §6.1). */
export type Initialisation =
	| { readonly kind: "normal"; readonly standardDeviation: number }
	| { readonly kind: "uniform"; readonly low: number; readonly high: number }
	| { readonly kind: "constant"; readonly value: number }
	/** log U(low, high): Mamba's A_log. */
	| { readonly kind: "log-uniform"; readonly low: number; readonly high: number }
	/** Inverse softplus of a step size drawn log-uniformly in [low, high], at least `floor`: Mamba's dt_bias. */
	| { readonly kind: "inverse-softplus"; readonly low: number; readonly high: number; readonly floor: number };

export interface ParameterSpec {
	/** Megatron's logical name. Of stacked experts: without the expert's number. */
	readonly name: string;
	/** Unsharded shape, of one expert when stacked. */
	readonly shape: readonly number[];
	/** Number of experts stacked into one tensor [experts, ...shape]; their names end in 0, 1, … */
	readonly experts?: number;
	readonly initialisation: Initialisation;
	readonly shard: Shard;
	/** Rows of a vocabulary that exist; the rest are padding, always zero. */
	readonly liveRows?: number;
	/** A copy of a tensor that another stage holds too; their gradients are summed, and of both one is `counted`. */
	readonly copy?: { readonly counted: boolean };
	/** Stored in fp32 even in bf16 training. */
	readonly alwaysF32?: boolean;
}

/** Megatron's rule: vectors and biases do not decay (docs/spec/language-model.md §7.2). */
export function decays(spec: ParameterSpec): boolean {
	return spec.shape.length > 1 && !spec.name.endsWith(".bias");
}

/** Unsharded shape without padding. */
export function logicalShape({ shape, liveRows }: ParameterSpec): readonly number[] {
	return liveRows === undefined ? shape : [liveRows, ...shape.slice(1)];
}

/** Full names of the tensors a spec stands for: one, or one an expert. */
export function logicalNames(spec: ParameterSpec): string[] {
	return spec.experts === undefined
		? [spec.name]
		: Array.from({ length: spec.experts }, (_, expert) => `${spec.name}${expert}`);
}
