/** A rank's list of actions: the passes of its schedule, each between its receive and its send, and the gradient reductions at the end. */
import {
	type Action,
	type Actor,
	type Chunk,
	type ChunkEdge,
	type EncoderShape,
	edgeFrom,
	edgesInto,
	encoderActor,
	type PassAction,
	type ScheduleShape,
	sameChunk,
	trains,
	type Work,
} from "./actions.ts";
import { combinePasses, lastNode } from "./combined.ts";
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

// Interleaved 1F1B with P stages and V virtual stages: stage p holds chunks p, p + P, … A group of G microbatches passes the stage's
// first chunk, then its second, …, before the next group begins. The bubble shrinks from P − 1 microbatches to (P − 1) / V, and
// more microbatches are in flight.

type InterleavedShape = Pick<ScheduleShape, "pipeline" | "stages" | "virtualStages" | "microbatches" | "groupSize">;

/** Passes of one stage; it begins with `extra` forward passes beside those it needs. */
function interleaved(shape: InterleavedShape, stage: number, extra = 0): PassAction[] {
	const { stages, virtualStages } = shape;
	const groups = groupsOf(shape);
	const order = groups.flatMap((group) =>
		Array.from({ length: virtualStages }, (_, turn) => group.map((microbatch) => ({ turn, microbatch }))).flat(),
	);
	const warmUp = interleavedWarmUp(shape, stage, extra);
	const passOf = (kind: PassAction["kind"], at: number): PassAction => {
		const { turn, microbatch } = order[at]!;
		const virtual = kind === "forward" ? turn : virtualStages - 1 - turn;
		return { kind, chunk: { module: shape.pipeline, index: virtual * stages + stage }, microbatch };
	};
	const passes: PassAction[] = [];
	for (let at = 0; at < order.length + warmUp; at++) {
		if (at < order.length) passes.push(passOf("forward", at));
		if (at >= warmUp) passes.push(passOf("backward", at - warmUp));
	}
	return passes;
}

/** Number of a stage's warm-up forward passes: those before its first forward-backward pair. */
function interleavedWarmUp(shape: InterleavedShape, stage: number, extra = 0): number {
	const { stages, virtualStages, microbatches } = shape;
	const largest = Math.max(...groupsOf(shape).map(({ length }) => length));
	return Math.min(2 * (stages - stage - 1) + (virtualStages - 1) * largest + extra, microbatches * virtualStages);
}

/** The ranges [begin, end) of microbatches of each group. */
function groupsOf({ stages, microbatches, groupSize }: InterleavedShape): number[][] {
	const groups: number[][] = [];
	for (let first = 0, end = 0; first < microbatches; first = end) {
		end = first + groupSize;
		// A group of fewer microbatches than stages would stall the pipeline.
		if (end + stages > microbatches) end = microbatches;
		groups.push(Array.from({ length: end - first }, (_, index) => first + index));
	}
	return groups;
}

// An encoder runs ahead of the language model. It warms up with as many forward passes as the language model has in flight, plus
// two: the transfers of one microbatch then hide behind the passes of another, and one slow pass delays no other rank. Of an encoder
// in pipeline stages this is the last stage, and each stage before it warms up with one pass more, as in 1F1B.
//
//   encoder    F0 → F1 → F2 → ←0 B0 F3 → ←1 B1 …            → sends rows, ← receives their gradient
//   language      ←0 F0 B0 →0 ←1 F1 B1 →1 …

/** Encoders, or stages of them, that run together: their chunks, and whether each trains. */
type EncoderChunks = readonly { readonly chunk: Chunk; readonly trains: boolean }[];

/** Passes of encoders in 1F1B order, one encoder after the other, with at most `ahead` microbatches in flight. */
function encoderPasses(encoders: EncoderChunks, microbatches: number, ahead: number): PassAction[] {
	const passes: PassAction[] = [];
	for (let forward = 0; forward < microbatches + ahead; forward++) {
		const backward = forward - ahead;
		for (const { chunk, trains } of backward >= 0 ? encoders : []) {
			if (trains) passes.push({ kind: "backward", chunk, microbatch: backward });
		}
		for (const { chunk } of forward < microbatches ? encoders : []) {
			passes.push({ kind: "forward", chunk, microbatch: forward });
		}
	}
	return passes;
}

/** The largest number of microbatches in flight: gone forward through the chunk and not yet backward. */
export function mostInFlight(work: readonly Work[], chunk: PassAction["chunk"]): number {
	let [live, most] = [0, 0];
	for (const pass of work) {
		if (pass.kind === "weight gradient") continue;
		if (!sameChunk(pass.chunk, chunk)) continue;
		live += pass.kind === "forward" ? 1 : -1;
		most = Math.max(most, live);
	}
	return most;
}

/**
 * The work of a rank that holds encoders and pipeline stage `stage`. The encoders' passes are collective over all stages, so every
 * rank runs them in one order: a microbatch is encoded before stage 0 needs it, `stage` passes earlier than here.
 */
function mergeEncoderPasses(encoded: readonly PassAction[], staged: readonly Work[], stage: number): Work[] {
	const forwards = staged.filter(({ kind }) => kind === "forward");
	const first = forwards[0]!.chunk.index;
	const passes: Work[] = [];
	let [done, forward] = [0, 0];
	for (const pass of staged) {
		if (pass.kind === "forward") {
			// Stage 0 runs the same order of microbatches, `stage` forward passes ahead.
			const needed = forwards
				.slice(0, forward++ + stage + 1)
				.findLast(({ chunk }) => chunk.index === first)!.microbatch;
			const end = encoded.findLastIndex(({ kind, microbatch }) => kind === "forward" && microbatch === needed) + 1;
			passes.push(...encoded.slice(done, Math.max(done, end)));
			done = Math.max(done, end);
		}
		passes.push(pass);
	}
	return [...passes, ...encoded.slice(done)];
}
