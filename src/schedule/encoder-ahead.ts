/**
 * An encoder runs ahead of the language model: it begins with as many forward passes as the model has under way and one
 * more for each side, so that transfers hide behind passes and a pass that takes longer than usual is made up for.
 *
 *   encoder    F0 → F1 → F2 → ←0 B0 F3 → ←1 B1 …            → sends rows, ← receives their gradient
 *   language      ←0 F0 B0 →0 ←1 F1 B1 →1 …
 */
import { encoderChunk, type PassAction, type Work } from "./actions.ts";

/** Forward passes of each microbatch, `ahead` more of them than backward passes where there are so many. */
export function aheadOf(microbatches: number, ahead: number): PassAction[] {
	const passes: PassAction[] = [];
	for (let forward = 0; forward < microbatches + ahead; forward++) {
		const backward = forward - ahead;
		if (backward >= 0) passes.push({ kind: "backward", chunk: encoderChunk, microbatch: backward });
		if (forward < microbatches) passes.push({ kind: "forward", chunk: encoderChunk, microbatch: forward });
	}
	return passes;
}

/** The most microbatches that have gone forward through a chunk and not yet backward, at any time. */
export function mostUnderWay(work: readonly Work[], chunk: PassAction["chunk"]): number {
	let [live, most] = [0, 0];
	for (const pass of work) {
		if (pass.kind === "weight gradient") continue;
		if (pass.chunk.module !== chunk.module || pass.chunk.index !== chunk.index) continue;
		live += pass.kind === "forward" ? 1 : -1;
		most = Math.max(most, live);
	}
	return most;
}

/**
 * The work of a rank that holds both the encoder and stage `stage` of the language model: a microbatch is encoded, on
 * all ranks in one order, before the first stage needs it, which is `stage` passes earlier than this one does.
 */
export function mergeAhead(encoder: readonly PassAction[], language: readonly Work[], stage: number): Work[] {
	const forwards = language.filter(({ kind }) => kind === "forward");
	const first = forwards[0]!.chunk.index;
	const passes: Work[] = [];
	let [encoded, forward] = [0, 0];
	for (const pass of language) {
		if (pass.kind === "forward") {
			// The first stage is `stage` forward passes further on, in the same order.
			const needed = forwards
				.slice(0, forward++ + stage + 1)
				.findLast(({ chunk }) => chunk.index === first)!.microbatch;
			const end = encoder.findIndex(({ kind, microbatch }) => kind === "forward" && microbatch === needed) + 1;
			passes.push(...encoder.slice(encoded, Math.max(encoded, end)));
			encoded = Math.max(encoded, end);
		}
		passes.push(pass);
	}
	return [...passes, ...encoder.slice(encoded)];
}
