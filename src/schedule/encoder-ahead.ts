/**
 * The encoder runs ahead of the language model. It warms up with as many forward passes as the language model has in flight, plus
 * two: the transfers of one microbatch then hide behind the passes of another, and one slow pass delays no other rank.
 *
 *   encoder    F0 → F1 → F2 → ←0 B0 F3 → ←1 B1 …            → sends rows, ← receives their gradient
 *   language      ←0 F0 B0 →0 ←1 F1 B1 →1 …
 */
import { encoderChunk, type PassAction, type Work } from "./actions.ts";

/** The encoder's passes in 1F1B order, with at most `ahead` microbatches in flight. */
export function encoderPasses(microbatches: number, ahead: number): PassAction[] {
	const passes: PassAction[] = [];
	for (let forward = 0; forward < microbatches + ahead; forward++) {
		const backward = forward - ahead;
		if (backward >= 0) passes.push({ kind: "backward", chunk: encoderChunk, microbatch: backward });
		if (forward < microbatches) passes.push({ kind: "forward", chunk: encoderChunk, microbatch: forward });
	}
	return passes;
}

/** The largest number of microbatches in flight: gone forward through the chunk and not yet backward. */
export function mostInFlight(work: readonly Work[], chunk: PassAction["chunk"]): number {
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
 * The work of a rank that holds both the encoder and stage `stage` of the language model. The encoder's passes are collective over
 * all stages, so every rank runs them in one order: a microbatch is encoded before stage 0 needs it, `stage` passes earlier than here.
 */
export function mergeEncoderPasses(encoder: readonly PassAction[], language: readonly Work[], stage: number): Work[] {
	const forwards = language.filter(({ kind }) => kind === "forward");
	const first = forwards[0]!.chunk.index;
	const passes: Work[] = [];
	let [encoded, forward] = [0, 0];
	for (const pass of language) {
		if (pass.kind === "forward") {
			// Stage 0 runs the same order of microbatches, `stage` forward passes ahead.
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
