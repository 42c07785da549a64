/** Descriptions of a model's parameters, from which their memory is made. */
import type { MatrixLayout, Shard } from "../parallel/index.ts";

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
	/** Whether Muon leaves it to AdamW though it has two axes: a table of embeddings, the output layer, Mamba-2's fused in_proj. */
	readonly elementwise?: boolean;
	/** Heights of the blocks of rows that alternate in a fused projection (query, key and value heads of a group): Muon's matrices. */
	readonly parts?: readonly number[];
}

/** Whether weight decay applies; by Megatron's rule not to vectors and biases (docs/spec/language-model.md §7.2). */
export function decays(spec: ParameterSpec): boolean {
	return spec.shape.length > 1 && !spec.name.endsWith(".bias");
}

/** How Muon's options read parameters (docs/spec/runtime.md §4.5). */
export interface MatrixOptions {
	/** Whether the blocks of fused projections are matrices of their own. */
	readonly splits: boolean;
}

/** How the matrices of a parameter lie, for an optimizer that updates each as a whole; null: it updates elements. */
export function matrixLayout(spec: ParameterSpec, { splits }: MatrixOptions): MatrixLayout | null {
	if (spec.shape.length !== 2 || spec.elementwise === true || spec.liveRows !== undefined) return null;
	const cut = spec.shard.kind === "replicated" ? null : spec.shard.dimension;
	return { cut, parts: (splits && spec.parts) || null };
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
