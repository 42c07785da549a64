/**
 * A step as a list of actions of one rank: passes of microbatches through chunks of modules, and what moves over the edges
 * between chunks. A schedule is a pure function that returns such a list; one interpreter executes it (execute.ts), the
 * same list is timed (simulate.ts), printed, and tested without a device.
 */

/** A part of a module that a microbatch passes as a whole: the encoder, or a segment of the language model's layers. */
export interface Chunk {
	readonly module: "encoder" | "language";
	/** From 0, in the order of the layers. */
	readonly index: number;
}

/** The direction over an edge: forward for rows, backward for their gradients. */
export type Way = "forward" | "backward";

/**
 * A microbatch, counted from 0, through a chunk. A backward pass adds to the gradients of weights too, unless a weight
 * gradient action of the same chunk and microbatch follows.
 */
export interface PassAction {
	readonly kind: Way;
	readonly chunk: Chunk;
	readonly microbatch: number;
	/** One node of the pass (combined.ts), in the order of the forward pass; absent: all of them. */
	readonly node?: number;
}

/** The gradients of a chunk's weights that the backward pass of a microbatch has left. */
export interface WeightGradientAction {
	readonly kind: "weight gradient";
	readonly chunk: Chunk;
	readonly microbatch: number;
	/** The node whose weight gradients are computed; absent: all that are left. */
	readonly node?: number;
}

/** A computation of a rank. */
export type Work = PassAction | WeightGradientAction;

/** Rows of a microbatch, or their gradient, over the edge that enters chunk `to`. A send does not wait for its receiver. */
export interface TransferAction {
	readonly kind: "send" | "receive";
	readonly way: Way;
	readonly to: Chunk;
	readonly microbatch: number;
}

/** The sums of a module's gradients over its replicas begin. */
export interface ReduceAction {
	readonly kind: "reduce";
	readonly module: Chunk["module"];
}

export type Action = Work | TransferAction | ReduceAction;

export const encoderChunk: Chunk = { module: "encoder", index: 0 };

export function languageChunk(index: number): Chunk {
	return { module: "language", index };
}

/** The sizes and options that decide a step's order on every rank. */
export interface ScheduleShape {
	/** Microbatches of a lane in a step. */
	readonly microbatches: number;
	/** Pipeline stages of the language model. */
	readonly stages: number;
	/** Chunks of each stage. Stage p has chunks p, p + stages, … */
	readonly virtualStages: number;
	/** Microbatches that pass a stage's chunk before its next one has its turn; counts with several virtual stages. */
	readonly groupSize: number;
	/** null: no encoder. */
	readonly encoder: {
		/** Whether it runs on the language model's ranks, all of them, rather than on ranks of its own. */
		readonly colocated: boolean;
		/** Whether gradients go back into it. */
		readonly trains: boolean;
	} | null;
	/** Whether the language model's backward passes leave the gradients of its weights for later. */
	readonly lateWeightGradients: boolean;
	/** Language model passes that take turns, so that each hides the other's exchange of experts' rows; null: no passes do. */
	readonly overlap: Overlap | null;
	/** Forward alone: an evaluation. */
	readonly forwardOnly: boolean;
}

/** The turns that passes take (combined.ts). */
export interface Overlap {
	/** Of every block of every chunk of the language model: whether it exchanges rows with other ranks. */
	readonly exchanges: readonly (readonly boolean[])[];
	/** Frees a backward block's activations before the forward block's experts run, at the price of hiding less. */
	readonly earlyRelease: boolean;
}

/** Ranks that do the same: those of the encoder's own grid, or of one stage of the language model. */
export type Actor = "encoder" | number;

/** All actors of a step, in the order in which a microbatch meets them. */
export function actorsOf({ stages, encoder }: ScheduleShape): Actor[] {
	const language = Array.from({ length: stages }, (_, stage) => stage);
	return encoder !== null && !encoder.colocated ? ["encoder", ...language] : language;
}

/** Such as "encoder" or "language.3". */
export function chunkName({ module, index }: Chunk): string {
	return module === "encoder" ? module : `${module}.${index}`;
}

/** Whether an action computes: all others move rows or begin sums. */
export function isWork(action: Action): action is Work {
	return "chunk" in action;
}

/** A text that tells an action from all others of its rank, such as "forward language.0 microbatch 3". */
export function describeAction(action: Action): string {
	if (action.kind === "reduce") return `reduce ${action.module}`;
	const { microbatch } = action;
	if ("way" in action) {
		const what = action.way === "forward" ? "rows into" : "the gradient out of";
		return `${action.kind} ${what} ${chunkName(action.to)} microbatch ${microbatch}`;
	}
	const node = action.node === undefined ? "" : ` node ${action.node}`;
	return `${action.kind} ${chunkName(action.chunk)} microbatch ${microbatch}${node}`;
}
