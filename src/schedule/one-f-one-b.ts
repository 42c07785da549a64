/**
 * 1F1B (docs/spec/runtime.md §3.2): stage p of P begins with P − p − 1 forward passes, then goes one forward, one
 * backward, and ends with the backward passes that are left. A stage has at most P − p microbatches under way.
 */
import type { Chunk, PassAction } from "./actions.ts";

/** Number of a stage's warm-up forward passes: those before its first forward-backward pair. */
export function warmUpOf(stages: number, stage: number, microbatches: number, extra = 0): number {
	return Math.min(stages - stage - 1 + extra, microbatches);
}

/** Passes of the stage that holds one chunk; it begins with `extra` forward passes beside those it needs. */
export function oneForwardOneBackward(stages: number, chunk: Chunk, microbatches: number, extra = 0): PassAction[] {
	const warmUp = warmUpOf(stages, chunk.index, microbatches, extra);
	const passes: PassAction[] = [];
	for (let forward = 0; forward < microbatches + warmUp; forward++) {
		if (forward < microbatches) passes.push({ kind: "forward", chunk, microbatch: forward });
		if (forward >= warmUp) passes.push({ kind: "backward", chunk, microbatch: forward - warmUp });
	}
	return passes;
}
