/** A rank's whole list: the passes of its schedule, in between what moves over edges, and the sums at the end. */
import { type Action, type Actor, languageChunk, type PassAction, type ScheduleShape, type Work } from "./actions.ts";
import { aheadOf, mergeAhead, mostUnderWay } from "./ahead.ts";
import { interleaved } from "./interleaved.ts";
import { withLateWeightGradients } from "./late-weight-gradients.ts";
import { oneForwardOneBackward } from "./one-f-one-b.ts";

/** What the ranks of one actor do in a step, in order. */
export function actionsOf(shape: ScheduleShape, actor: Actor): Action[] {
	const work = workOf(shape, actor);
	return [...work.flatMap((one) => withTransfers(shape, one)), ...reductions(shape, work)];
}

/**
 * Messages that may be on their way over an edge at once, each way, however many microbatches a step has: as many as any
 * chunk has passes under way.
 */
export function inFlight(shape: Omit<ScheduleShape, "microbatches" | "forwardOnly">): number {
	const { stages, virtualStages, groupSize } = shape;
	const first = Array.from({ length: virtualStages }, (_, virtual) => languageChunk(virtual * stages));
	// One group as large as any, and several.
	const most = [1, 3].map((groups) => {
		const training = { ...shape, microbatches: groups * groupSize + stages - 1, forwardOnly: false };
		const passes = languagePasses(training, 0);
		return Math.max(encoderAhead(training), ...first.map((chunk) => mostUnderWay(passes, chunk)));
	});
	return Math.max(...most) + 1;
}

function workOf(shape: ScheduleShape, actor: Actor): Work[] {
	const { encoder, forwardOnly, lateWeightGradients } = shape;
	const ahead = aheadOf(shape.microbatches, encoderAhead(shape));
	const encoded = encoder?.trains ? ahead : ahead.filter(({ kind }) => kind === "forward");
	const languageWork = (stage: number): Work[] => {
		const passes = languagePasses(shape, stage);
		return lateWeightGradients ? withLateWeightGradients(passes, stage) : passes;
	};
	const language = actor === "encoder" ? [] : languageWork(actor);
	const work = actor === "encoder" ? encoded : encoder?.colocated ? mergeAhead(encoded, language, actor) : language;
	return forwardOnly ? work.filter(({ kind }) => kind === "forward") : work;
}

function languagePasses(shape: ScheduleShape, stage: number): PassAction[] {
	return shape.virtualStages === 1
		? oneForwardOneBackward(shape.stages, stage, shape.microbatches)
		: interleaved(shape, stage);
}

/** Microbatches that the encoder has under way. */
function encoderAhead(shape: ScheduleShape): number {
	const live = mostUnderWay(languagePasses(shape, 0), languageChunk(0));
	// Beside the language model, one for each side of the transfer; on its ranks, one for each stage further on.
	return Math.max(1, shape.encoder?.colocated ? live + shape.stages - 1 : live + 2);
}

function withTransfers(shape: ScheduleShape, pass: Work): Action[] {
	if (pass.kind === "weight gradient") return [pass];
	const { stages, virtualStages, encoder } = shape;
	const { kind, chunk, microbatch } = pass;
	const last = stages * virtualStages - 1;
	const inLanguage = chunk.module === "language";
	const next = !inLanguage ? languageChunk(0) : chunk.index < last ? languageChunk(chunk.index + 1) : null;
	const entered = inLanguage && (chunk.index > 0 || encoder !== null) ? chunk : null;
	const returned = entered !== null && (entered.index > 0 || encoder!.trains) ? entered : null;
	const transfer = (kind: "send" | "receive", way: PassAction["kind"], to: typeof next): Action[] =>
		to === null ? [] : [{ kind, way, to, microbatch }];
	return kind === "forward"
		? [...transfer("receive", "forward", entered), pass, ...transfer("send", "forward", next)]
		: [...transfer("receive", "backward", next), pass, ...transfer("send", "backward", returned)];
}

/** Modules without backward passes have nothing to sum. */
function reductions({ forwardOnly }: ScheduleShape, work: readonly Work[]): Action[] {
	if (forwardOnly) return [];
	const modules = new Set(work.filter(({ kind }) => kind === "backward").map(({ chunk }) => chunk.module));
	return (["encoder", "language"] as const)
		.filter((module) => modules.has(module))
		.map((module) => ({ kind: "reduce", module }));
}
