/** What a chunk of a module does with one microbatch: forward when it is made, backward when its gradient has come. */
import type { Rows } from "../parallel/edge.ts";
import type { WeightGradients } from "../tensor/tape.ts";
import type { Tensor } from "../tensor/tensor.ts";

export interface Pass extends Disposable {
	/** What the next chunk takes, owned by the pass; null where there is none. */
	readonly output: Rows | null;
	/** Whether it goes backward. */
	readonly returns: boolean;
	/**
	 * From the output's gradient (null: none came; taken over) that of the input; null where none is wanted. Late weight
	 * gradients are left for computeWeightGradients.
	 */
	backward(gradient: Tensor | null, weightGradients: WeightGradients): Tensor | null;
	computeWeightGradients(): void;
}

/** The passes of one module's chunks on this rank. */
export interface ModulePasses {
	/** Takes over `input`: what the chunk before has sent; null for the first one. */
	forward(chunk: number, microbatch: number, input: Rows | null): Pass;
	/** What a chunk's edge is to receive of a microbatch: samples whose rows are counted, or rows. */
	expected(chunk: number, microbatch: number): number;
	/** Called where this rank is about to wait for a gradient. */
	beforeWait?(): void;
}
