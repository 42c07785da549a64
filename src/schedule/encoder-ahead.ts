/**
 * An encoder runs ahead of the language model. It warms up with as many forward passes as the language model has in flight, plus
 * two: the transfers of one microbatch then hide behind the passes of another, and one slow pass delays no other rank. Of an encoder
 * in pipeline stages this is the last stage, and each stage before it warms up with one pass more, as in 1F1B.
 *
 *   encoder    F0 → F1 → F2 → ←0 B0 F3 → ←1 B1 …            → sends rows, ← receives their gradient
 *   language      ←0 F0 B0 →0 ←1 F1 B1 →1 …
 */
import { type Chunk, type PassAction, sameChunk, type Work } from "./actions.ts";

/** Encoders, or stages of them, that run together: their chunks, and whether each trains. */
export type EncoderChunks = readonly { readonly chunk: Chunk; readonly trains: boolean }[];

/** Passes of encoders in 1F1B order, one encoder after the other, with at most `ahead` microbatches in flight. */
export function encoderPasses(encoders: EncoderChunks, microbatches: number, ahead: number): PassAction[] {
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
export function mergeEncoderPasses(encoded: readonly PassAction[], staged: readonly Work[], stage: number): Work[] {
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
