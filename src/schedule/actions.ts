/**
 * A step as one rank's list of actions: forward and backward passes of microbatches through chunks of modules, and the transfers
 * over the edges between chunks. A schedule is a pure function that returns such a list. One interpreter executes it (execute.ts);
 * the same list is timed (simulate.ts), printed, and tested without a device.
 */

/** Megatron's model chunk: a whole module, a pipeline stage of it, or one of a stage's virtual stages. */
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

/** A module whose last chunk's rows enter the first stage of the pipeline. */
export interface EncoderShape {
	readonly name: string;
	/** Whether it runs, as one chunk, on the ranks of the stages, all of them, rather than on ranks of its own. */
	readonly colocated: boolean;
	/** Of each of its chunks, one for each of its stages: whether gradients go back into it. */
	readonly trains: readonly boolean[];
}

/** Everything that the order of a step depends on, equal on all ranks. */
export interface ScheduleShape {
	/** Microbatches of a lane in a step. */
	readonly microbatches: number;
	/** Name of the module that the encoders' rows enter: the language model. */
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

/** A set of ranks with one list of actions: an encoder's stage on ranks of its own, by encoderActor(), or a stage of the pipeline. */
export type Actor = string | number;

/** Such as "radio_encoder" or, of several stages, "radio_encoder stage 1". */
export function encoderActor(name: string, stage: number, stages: number): Actor {
	return stages === 1 ? name : `${name} stage ${stage}`;
}

/** All actors of a step, in the order in which a microbatch meets them. */
export function actorsOf({ stages, encoders }: ScheduleShape): Actor[] {
	const alone = encoders
		.filter(({ colocated }) => !colocated)
		.flatMap(({ name, trains }) => trains.map((_, stage) => encoderActor(name, stage, trains.length)));
	return [...alone, ...Array.from({ length: stages }, (_, stage) => stage)];
}

/** Number of a module's chunks. */
function chunksOf({ pipeline, stages, virtualStages, encoders }: ScheduleShape, module: string): number {
	return module === pipeline ? stages * virtualStages : encoders.find(({ name }) => name === module)!.trains.length;
}

/** Whether gradients go back into a chunk. */
export function trains({ encoders }: Pick<ScheduleShape, "encoders">, { module, index }: Chunk): boolean {
	return encoders.find(({ name }) => name === module)?.trains[index] ?? true;
}

/** The edges that enter a chunk: from the chunk before, and from the encoders into the pipeline's first. */
export function edgesInto(shape: ScheduleShape, to: Chunk): ChunkEdge[] {
	if (to.index > 0) return [{ from: { ...to, index: to.index - 1 }, to }];
	if (to.module !== shape.pipeline) return [];
	return shape.encoders.map(({ name, trains }) => ({ from: { module: name, index: trains.length - 1 }, to }));
}

/** The edge that leaves a chunk; null: the chunk is the last one. */
export function edgeFrom(shape: ScheduleShape, from: Chunk): ChunkEdge | null {
	const next = { ...from, index: from.index + 1 };
	if (next.index < chunksOf(shape, from.module)) return { from, to: next };
	return from.module === shape.pipeline ? null : { from, to: { module: shape.pipeline, index: 0 } };
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
