/** A rank's list of actions: the passes of its schedule, each between its receive and its send, and the gradient reductions at the end. */
import { type Action, type Actor, languageChunk, type PassAction, type ScheduleShape, type Work } from "./actions.ts";
import { combinePasses, lastNode } from "./combined.ts";
import { encoderPasses, mergeEncoderPasses, mostInFlight } from "./encoder-ahead.ts";
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
	const { stages, virtualStages, groupSize } = shape;
	const first = Array.from({ length: virtualStages }, (_, virtual) => languageChunk(virtual * stages));
	// One group of microbatches has the fewest in flight, three are a full pipeline: the maximum over any number is among them.
	const most = [1, 3].map((groups) => {
		const training = { ...shape, microbatches: groups * groupSize + stages - 1, forwardOnly: false };
		const passes = languagePasses(training, 0);
		return Math.max(encoderAhead(training), ...first.map((chunk) => mostInFlight(passes, chunk)));
	});
	return Math.max(...most) + 1;
}

function workOf(shape: ScheduleShape, actor: Actor): Work[] {
	const { encoder, forwardOnly, lateWeightGradients } = shape;
	const ahead = encoderPasses(shape.microbatches, encoderAhead(shape));
	const encoded = encoder?.trains ? ahead : ahead.filter(({ kind }) => kind === "forward");
	const forwardsOf = (work: readonly Work[]) => work.filter(({ kind }) => kind === "forward");
	if (actor === "encoder") return forwardOnly ? forwardsOf(encoded) : encoded;
	const passes = languagePasses(shape, actor);
	const besideEncoder = (work: readonly Work[]) =>
		encoder?.colocated ? mergeEncoderPasses(encoded, work, actor) : [...work];
	if (forwardOnly) return forwardsOf(besideEncoder(passes));
	if (shape.overlap !== null)
		return combinePasses(besideEncoder(passes) as PassAction[], languageWarmUp(shape, actor), shape);
	return besideEncoder(lateWeightGradients ? withLateWeightGradients(passes, actor) : passes);
}

function languagePasses(shape: ScheduleShape, stage: number): PassAction[] {
	return shape.virtualStages === 1
		? oneForwardOneBackward(shape.stages, stage, shape.microbatches, extraWarmUp(shape))
		: interleaved(shape, stage, extraWarmUp(shape));
}

function languageWarmUp(shape: ScheduleShape, stage: number): number {
	return shape.virtualStages === 1
		? warmUpOf(shape.stages, stage, shape.microbatches, extraWarmUp(shape))
		: interleavedWarmUp(shape, stage, extraWarmUp(shape));
}

/** Combined 1F1B warms up with one more forward pass, so that the two passes it interleaves are of different microbatches. */
function extraWarmUp({ overlap }: ScheduleShape): number {
	return overlap === null ? 0 : 1;
}

/** The largest number of microbatches that the encoder has in flight. */
function encoderAhead(shape: ScheduleShape): number {
	const live = mostInFlight(languagePasses(shape, 0), languageChunk(0));
	// On ranks of its own: one more for each side of the transfer. Colocated: one more for each stage, which encode together.
	return Math.max(1, shape.encoder?.colocated ? live + shape.stages - 1 : live + 2);
}

function withTransfers(shape: ScheduleShape, pass: Work): Action[] {
	if (pass.kind === "weight gradient") return [pass];
	const { stages, virtualStages, encoder } = shape;
	const { kind, chunk, microbatch, node } = pass;
	const last = stages * virtualStages - 1;
	const inLanguage = chunk.module === "language";
	const next = !inLanguage ? languageChunk(0) : chunk.index < last ? languageChunk(chunk.index + 1) : null;
	const entered = inLanguage && (chunk.index > 0 || encoder !== null) ? chunk : null;
	const returned = entered !== null && (entered.index > 0 || encoder!.trains) ? entered : null;
	const transfer = (kind: "send" | "receive", direction: PassAction["kind"], to: typeof next): Action[] =>
		to === null ? [] : [{ kind, direction, to, microbatch }];
	const end = node === undefined ? undefined : lastNode(shape.overlap!, chunk.index);
	const [enters, leaves] = kind === "forward" ? [0, end] : [end, 0];
	const [from, to] = kind === "forward" ? [entered, next] : [next, returned];
	return [
		...(node === undefined || node === enters ? transfer("receive", kind, from) : []),
		pass,
		...(node === undefined || node === leaves ? transfer("send", kind, to) : []),
	];
}

/** Reductions of the modules that have backward passes. */
function reductions({ forwardOnly }: ScheduleShape, work: readonly Work[]): Action[] {
	if (forwardOnly) return [];
	const modules = new Set(work.filter(({ kind }) => kind === "backward").map(({ chunk }) => chunk.module));
	return (["encoder", "language"] as const)
		.filter((module) => modules.has(module))
		.map((module) => ({ kind: "reduce", module }));
}
