/**
 * Late weight gradients (--delay-wgrad-compute): a backward pass computes and sends the gradient of its input first; its weight
 * gradients are computed in the time in which the stage would otherwise wait. Stage p computes them p backward passes later,
 * which lets the first stages go backward sooner and leaves work for the end, while gradients still travel to the first stage.
 *
 * A stage idles (P − 1)(F + B + W) in a step without it and (P − 1)(F + B − W) with it, F, B and W being a microbatch's forward
 * pass, input gradients and weight gradients; interleaved, a V-th of that. This is ZB-H1 of Qi et al., Zero Bubble Pipeline
 * Parallelism. In 1F1B stage p has P − p microbatches in flight and p with weight gradients to come, so it keeps about as much
 * memory as stage 0.
 *
 *     stage 0   F0 F1 ·· B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
 *     stage 1   ·· F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
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
