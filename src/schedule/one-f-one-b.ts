/**
 * 1F1B (docs/spec/runtime.md §3.2): stage p of P begins with P − p − 1 forward passes, then goes one forward, one
 * backward, and ends with the backward passes that are left. A stage has at most P − p microbatches under way.
 */
import { languageChunk, type PassAction } from "./actions.ts";

/** Forward passes of a stage before its first backward pass, less the one that comes with it. */
export function warmUpOf(stages: number, stage: number, microbatches: number, more = 0): number {
	return Math.min(stages - stage - 1 + more, microbatches);
}

/** Passes of one stage, which holds one chunk; it begins with `more` forward passes than it must. */
export function oneForwardOneBackward(stages: number, stage: number, microbatches: number, more = 0): PassAction[] {
	const chunk = languageChunk(stage);
	const warmUp = warmUpOf(stages, stage, microbatches, more);
	const passes: PassAction[] = [];
	for (let forward = 0; forward < microbatches + warmUp; forward++) {
		if (forward < microbatches) passes.push({ kind: "forward", chunk, microbatch: forward });
		if (forward >= warmUp) passes.push({ kind: "backward", chunk, microbatch: forward - warmUp });
	}
	return passes;
}
