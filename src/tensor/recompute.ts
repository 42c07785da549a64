/** Activation recomputation: keep a layer's input, run its forward again when its backward needs the rest. */
import { GradientSlot } from "./gradient.ts";
import { Tape } from "./tape.ts";
import type { FloatDtype, Tensor } from "./tensor.ts";

/**
 * y = layer(tape, x), of which only x is kept for backward. `layer` must compute the same twice: dropout does, its
 * masks come from counters; side effects must look at tape.replaying.
 */
export function recompute(tape: Tape, x: Tensor, layer: (tape: Tape, x: Tensor) => Tensor): Tensor {
	if (!tape.recording) return layer(tape, x);
	const forward = new Tape(tape.device, { recording: false, training: tape.training, replaying: tape.replaying });
	using input = x.withGradient(null);
	const y = tape.output(layer(forward, input), true);
	tape.record({
		name: "recompute",
		outputs: [y],
		keep: [x],
		parameters: forward.parameters,
		backward: ([dy]) => {
			const again = new Tape(tape.device, {
				recording: true,
				training: tape.training,
				replaying: true,
				outer: tape,
			});
			using replayed = x.withGradient(new GradientSlot(x.device, x.shape, x.dtype as FloatDtype));
			using output = layer(again, replayed);
			output.gradient!.accumulate(dy!.share());
			again.backward();
			const dx = replayed.gradient!.take();
			if (dx) {
				if (x.gradient) x.gradient.accumulate(dx);
				else dx[Symbol.dispose]();
			}
		},
	});
	return y;
}
