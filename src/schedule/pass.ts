/** One microbatch's pass through a chunk of a module: forward, then backward when the gradient of its output has arrived. */
import type { Companion, Rows } from "../parallel/index.ts";
import type { Tensor, WeightGradients } from "../tensor/index.ts";
import type { ChunkEdge } from "./actions.ts";

export interface Pass extends Disposable {
	/** Input of the next chunk, owned by the pass; null: the chunk is the last one, or has not gone forward yet. */
	readonly output: Rows | null;
	/** Whether a backward pass follows. */
	readonly returns: boolean;
	/** Runs the forward pass, or one node of it; true after the last node. */
	forward(node?: number): boolean;
	/**
	 * Runs the backward pass, or one node of it. `gradient`: the output's, taken over; null: no gradient came, or an earlier node took
	 * it. Late weight gradients are left for computeWeightGradients.
	 */
	backward(gradient: Tensor | null, weightGradients: WeightGradients, node?: number): Backward;
	/** Computes the late weight gradients of one node, or all that are left. */
	computeWeightGradients(node?: number): void;
}

/**
 * State of a backward pass: its end, with the gradient of each input in the order of the edges that enter the chunk (null: it
 * is not wanted), or a node after which others follow.
 */
export type Backward =
	| { readonly finished: true; readonly gradients: readonly (Tensor | null)[] }
	| { readonly finished: false };

/** Rows that have come over an edge. */
export interface Input {
	readonly edge: ChunkEdge;
	readonly rows: Rows;
	/** Whether their gradient goes back. */
	readonly returns: boolean;
}

/** The passes of one module's chunks on this rank. */
export interface ModulePasses {
	/** A pass that has not gone forward yet. Takes over the rows of `inputs`, one for each edge that enters the chunk. */
	begin(chunk: number, microbatch: number, inputs: readonly Input[]): Pass;
	/** Sizes for the receive of an edge's rows: on a counted edge the samples of each source, otherwise the rows of each. */
	expected(edge: ChunkEdge, microbatch: number): readonly number[];
	/** Matrices without a gradient that travel with a microbatch's rows between its chunks; default: none. */
	companions?(microbatch: number): readonly Companion[];
}
