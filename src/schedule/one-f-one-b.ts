/**
 * 1F1B (runtime.md §3.2): stage p of P begins with P − p − 1 forward passes, then goes one forward, one backward, and ends
 * with the backward passes that are left. A stage has at most P − p microbatches under way.
 */
import { languageChunk, type PassAction } from "./actions.ts";

/** Passes of one stage, which holds one chunk. */
export function oneForwardOneBackward(stages: number, stage: number, microbatches: number): PassAction[] {
	const chunk = languageChunk(stage);
	const warmUp = Math.min(stages - stage - 1, microbatches);
	const passes: PassAction[] = [];
	for (let forward = 0; forward < microbatches + warmUp; forward++) {
		if (forward < microbatches) passes.push({ kind: "forward", chunk, microbatch: forward });
		if (forward >= warmUp) passes.push({ kind: "backward", chunk, microbatch: forward - warmUp });
	}
	return passes;
}
