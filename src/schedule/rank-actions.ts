/** A rank's list of actions: the passes of its schedule, each between its receive and its send, and the gradient reductions at the end. */
import {
	type Action,
	type Actor,
	type ChunkEdge,
	type EncoderShape,
	edgeFrom,
	edgesInto,
	encoderActor,
	type PassAction,
	type ScheduleShape,
	trains,
	type Work,
} from "./actions.ts";
import { combinePasses, lastNode } from "./combined.ts";
import { type EncoderChunks, encoderPasses, mergeEncoderPasses, mostInFlight } from "./encoder-ahead.ts";
import { interleaved, interleavedWarmUp } from "./interleaved.ts";
import { withLateWeightGradients } from "./late-weight-gradients.ts";
import { oneForwardOneBackward, warmUpOf } from "./one-f-one-b.ts";

/** Actions of one actor's ranks in a step, in order. */
export function actionsOf(shape: ScheduleShape, actor: Actor): Action[] {
	const work = workOf(shape, actor);
	return [...work.flatMap((one) => withTransfers(shape, one)), ...reductions(shape, work)];
}

/**
 * The largest number of messages in flight over an edge in one direction, for any number of microbatches: the largest number of
 * microbatches that a chunk has in flight, plus one.
 */
export function inFlight(shape: Omit<ScheduleShape, "microbatches" | "forwardOnly">): number {
	const { pipeline, stages, virtualStages, groupSize, encoders } = shape;
	const first = Array.from({ length: virtualStages }, (_, virtual) => ({ module: pipeline, index: virtual * stages }));
	const places = encoders.length === 0 ? [{ colocated: false, trains: [true] }] : encoders;
	// One group of microbatches has the fewest in flight, three are a full pipeline: the maximum over any number is among them.
	const most = [1, 3].map((groups) => {
		const training = { ...shape, microbatches: groups * groupSize + stages - 1, forwardOnly: false };
		const passes = stagePasses(training, 0);
		const ahead = places.map((encoder) => encoderAhead(training, encoder, 0));
		return Math.max(...ahead, ...first.map((chunk) => mostInFlight(passes, chunk)));
	});
	return Math.max(...most) + 1;
}

function workOf(shape: ScheduleShape, actor: Actor): Work[] {
	const { forwardOnly, lateWeightGradients } = shape;
	const forwardsOf = (work: readonly Work[]) => work.filter(({ kind }) => kind === "forward");
	const { encoders, microbatches } = shape;
	if (typeof actor === "string") {
		const [encoder, stage] = encoders
			.flatMap((one) => one.trains.map((_, stage) => [one, stage] as const))
			.find(([{ name, trains }, stage]) => encoderActor(name, stage, trains.length) === actor)!;
		const own = encoderPasses(chunksAt(stage, [encoder]), microbatches, encoderAhead(shape, encoder, stage));
		return forwardOnly ? forwardsOf(own) : own;
	}
	const beside = encoders.filter(({ colocated }) => colocated);
	const encoded =
		beside.length === 0 ? [] : encoderPasses(chunksAt(0, beside), microbatches, encoderAhead(shape, beside[0]!, 0));
	const passes = stagePasses(shape, actor);
	const besideEncoders = (work: readonly Work[]) => mergeEncoderPasses(encoded, work, actor);
	if (forwardOnly) return forwardsOf(besideEncoders(passes));
	if (shape.overlap !== null)
		return combinePasses(besideEncoders(passes) as PassAction[], stageWarmUp(shape, actor), shape);
	return besideEncoders(lateWeightGradients ? withLateWeightGradients(passes, actor) : passes);
}

function chunksAt(index: number, encoders: readonly EncoderShape[]): EncoderChunks {
	return encoders.map(({ name, trains }) => ({ chunk: { module: name, index }, trains: trains[index]! }));
}

function stagePasses(shape: ScheduleShape, stage: number): PassAction[] {
	const { pipeline, stages, microbatches } = shape;
	return shape.virtualStages === 1
		? oneForwardOneBackward(stages, { module: pipeline, index: stage }, microbatches, extraWarmUp(shape))
		: interleaved(shape, stage, extraWarmUp(shape));
}

function stageWarmUp(shape: ScheduleShape, stage: number): number {
	return shape.virtualStages === 1
		? warmUpOf(shape.stages, stage, shape.microbatches, extraWarmUp(shape))
		: interleavedWarmUp(shape, stage, extraWarmUp(shape));
}

/** Combined 1F1B warms up with one more forward pass, so that the two passes it interleaves are of different microbatches. */
function extraWarmUp({ overlap }: ScheduleShape): number {
	return overlap === null ? 0 : 1;
}

/** The largest number of microbatches that a stage of an encoder has in flight. */
function encoderAhead(
	shape: ScheduleShape,
	{ colocated, trains }: Pick<EncoderShape, "colocated" | "trains">,
	stage: number,
): number {
	const live = mostInFlight(stagePasses(shape, 0), { module: shape.pipeline, index: 0 });
	// On ranks of its own: one more for each side of the transfer, and for each stage behind. Colocated: one more for each stage of
	// the pipeline, which encode together.
	return Math.max(1, colocated ? live + shape.stages - 1 : live + 2 + trains.length - 1 - stage);
}

function withTransfers(shape: ScheduleShape, pass: Work): Action[] {
	if (pass.kind === "weight gradient") return [pass];
	const { kind, chunk, microbatch, node } = pass;
	const next = edgeFrom(shape, chunk);
	const entered = edgesInto(shape, chunk);
	const left = next === null ? [] : [next];
	const [from, to] = kind === "forward" ? [entered, left] : [left, entered.filter((edge) => trains(shape, edge.from))];
	const transfers = (kind: "send" | "receive", edges: readonly ChunkEdge[]) =>
		edges.map((edge): Action => ({ kind, direction: pass.kind, ...edge, microbatch }));
	const end = node === undefined ? undefined : lastNode(shape.overlap!, chunk.index);
	const [enters, leaves] = kind === "forward" ? [0, end] : [end, 0];
	return [
		...(node === undefined || node === enters ? transfers("receive", from) : []),
		pass,
		...(node === undefined || node === leaves ? transfers("send", to) : []),
	];
}

/** Reductions of the modules that have backward passes. */
function reductions({ forwardOnly, encoders, pipeline }: ScheduleShape, work: readonly Work[]): Action[] {
	if (forwardOnly) return [];
	const modules = new Set(work.filter(({ kind }) => kind === "backward").map(({ chunk }) => chunk.module));
	return [...encoders.map(({ name }) => name), pipeline]
		.filter((module) => modules.has(module))
		.map((module) => ({ kind: "reduce", module }));
}
