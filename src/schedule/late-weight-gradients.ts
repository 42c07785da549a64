/**
 * Late weight gradients: a backward pass sends on the gradient of its input first and leaves those of its weights for the
 * time in which its stage would wait. Stage p computes them p backward passes later: so much sooner can the first stages
 * begin to go backward, and so much is left to do at the end, while gradients still travel to the first stage. Of the
 * (P − 1)(F + B + W) that a stage idles in a step, F, B and W being its forward pass and the two parts of its backward
 * pass, (P − 1)(F + B − W) remain; interleaved, a V-th of it. This is ZB-H1 of Qi et al., Zero Bubble Pipeline Parallelism.
 * In 1F1B stage p has P − p microbatches under way and p whose weight gradients are to come, about as much to keep as
 * stage 0 has.
 *
 *   stage 0   F0 F1 ·· B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
 *   stage 1   ·· F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
 */
import type { PassAction, Work } from "./actions.ts";

/** One stage's passes with their weight gradients, in the order of the backward passes. */
export function withLateWeightGradients(passes: readonly PassAction[], stage: number): Work[] {
	const left: Work[] = [];
	const work = passes.flatMap((pass): Work[] => {
		if (pass.kind === "forward") return [pass];
		left.push({ ...pass, kind: "weight gradient" });
		return [pass, ...left.splice(0, left.length - stage)];
	});
	return [...work, ...left];
}
