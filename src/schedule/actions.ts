/**
 * A step as one rank's list of actions: forward and backward passes of microbatches through chunks of modules, and the transfers
 * over the edges between chunks. A schedule is a pure function that returns such a list. One interpreter executes it (execute.ts);
 * the same list is timed (simulate.ts), printed, and tested without a device.
 */

/** Megatron's model chunk: a whole module, or one virtual pipeline stage of the module that is cut into stages. */
export interface Chunk {
	readonly module: string;
	/** From 0, in the order of the layers. */
	readonly index: number;
}

/** forward: rows, from the encoders to the last stage; backward: their gradients, the other way. */
export type Direction = "forward" | "backward";

/**
 * Passes a microbatch, counted from 0, through a chunk. A backward pass also computes the weight gradients, unless a
 * WeightGradientAction of the same chunk and microbatch follows.
 */
export interface PassAction {
	readonly kind: Direction;
	readonly chunk: Chunk;
	readonly microbatch: number;
	/** Index of the one node of the pass to run (combined.ts), in the order of the forward pass; absent: the whole pass. */
	readonly node?: number;
}

/** Computes the weight gradients that the backward pass of a microbatch has put off (late-weight-gradients.ts). */
export interface WeightGradientAction {
	readonly kind: "weight gradient";
	readonly chunk: Chunk;
	readonly microbatch: number;
	/** Index of the node whose weight gradients are computed; absent: those of all nodes that are left. */
	readonly node?: number;
}

/** An action that computes, as opposed to one that communicates. */
export type Work = PassAction | WeightGradientAction;

/** The output rows of chunk `from` are input rows of chunk `to`. */
export interface ChunkEdge {
	readonly from: Chunk;
	readonly to: Chunk;
}

/** Sends or receives a microbatch's rows, or their gradient, over an edge. A send does not wait for its receiver. */
export interface TransferAction extends ChunkEdge {
	readonly kind: "send" | "receive";
	readonly direction: Direction;
	readonly microbatch: number;
}

/** Starts the reduction of a module's gradients over its data-parallel replicas. */
export interface ReduceAction {
	readonly kind: "reduce";
	readonly module: string;
}

export type Action = Work | TransferAction | ReduceAction;

/** A module of one chunk, whose rows enter the first stage. */
export interface EncoderShape {
	readonly name: string;
	/** Whether it runs on the ranks of the stages, all of them, rather than on ranks of its own. */
	readonly colocated: boolean;
	/** Whether gradients go back into it. */
	readonly trains: boolean;
}

/** Everything that the order of a step depends on, equal on all ranks. */
export interface ScheduleShape {
	/** Microbatches of a lane in a step. */
	readonly microbatches: number;
	/** Name of the module that is cut into stages: the language model. */
	readonly pipeline: string;
	/** Pipeline stages of it. */
	readonly stages: number;
	/** Chunks of each stage. Stage p has chunks p, p + stages, … */
	readonly virtualStages: number;
	/** Megatron's microbatch group size per virtual stage: microbatches that pass one chunk of a stage before the stage's next chunk. */
	readonly groupSize: number;
	readonly encoders: readonly EncoderShape[];
	/** Whether the stages' weight gradients are put off (--delay-wgrad-compute). */
	readonly lateWeightGradients: boolean;
	/** Combined 1F1B (--overlap-moe-expert-parallel-comm), in which each pass hides the other's all-to-all; null: plain 1F1B. */
	readonly overlap: Overlap | null;
	/** An evaluation: no backward passes. */
	readonly forwardOnly: boolean;
}

/** Options of combined 1F1B (combined.ts). */
export interface Overlap {
	/** [chunk][block] of the stages: whether the block sends experts' rows to other ranks. */
	readonly exchanges: readonly (readonly boolean[])[];
	/** Runs the backward node that frees a block's activations before the forward block's experts: less memory, less hidden. */
	readonly earlyRelease: boolean;
}

/** A set of ranks with one list of actions: an encoder's own grid, by its name, or a pipeline stage. */
export type Actor = string | number;

/** All actors of a step, in the order in which a microbatch meets them. */
export function actorsOf({ stages, encoders }: ScheduleShape): Actor[] {
	const alone = encoders.filter(({ colocated }) => !colocated).map(({ name }) => name);
	return [...alone, ...Array.from({ length: stages }, (_, stage) => stage)];
}

/** The edges that enter a chunk: from the encoders into the first stage, and from stage to stage. */
export function edgesInto({ pipeline, encoders }: ScheduleShape, to: Chunk): ChunkEdge[] {
	if (to.module !== pipeline) return [];
	if (to.index > 0) return [{ from: { module: pipeline, index: to.index - 1 }, to }];
	return encoders.map(({ name }) => ({ from: { module: name, index: 0 }, to }));
}

/** The edge that leaves a chunk; null: the chunk is the last one. */
export function edgeFrom({ pipeline, stages, virtualStages }: ScheduleShape, from: Chunk): ChunkEdge | null {
	if (from.module !== pipeline) return { from, to: { module: pipeline, index: 0 } };
	if (from.index === stages * virtualStages - 1) return null;
	return { from, to: { module: pipeline, index: from.index + 1 } };
}

/** Such as "language.3". */
export function chunkName({ module, index }: Chunk): string {
	return `${module}.${index}`;
}

export function sameChunk(one: Chunk, other: Chunk): boolean {
	return one.module === other.module && one.index === other.index;
}

/** Whether an action computes, as opposed to a transfer or a reduction. */
export function isWork(action: Action): action is Work {
	return "chunk" in action;
}

/** Names an action uniquely among those of its rank, such as "forward language.0 microbatch 3". */
export function describeAction(action: Action): string {
	if (action.kind === "reduce") return `reduce ${action.module}`;
	const { microbatch } = action;
	if ("direction" in action) {
		const what = action.direction === "forward" ? "rows" : "the gradient of rows";
		return `${action.kind} ${what} from ${chunkName(action.from)} into ${chunkName(action.to)} microbatch ${microbatch}`;
	}
	const node = action.node === undefined ? "" : ` node ${action.node}`;
	return `${action.kind} ${chunkName(action.chunk)} microbatch ${microbatch}${node}`;
}
