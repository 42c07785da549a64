/**
 * Activations that are not kept in device memory. Recomputation: keep what enters a part of the model, run its forward again when
 * its backward needs the rest; the output of such a part may be given up too, where the operations that read it are recorded
 * right behind it. Offloading: keep them in the host's memory.
 */
import { Tape } from "./tape.ts";
import type { Tensor } from "./tensor.ts";

/**
 * A part of the model, y = compute(tape, inputs), in fresh memory. It must compute the same twice: dropout does, its masks
 * come from counters; side effects must look at tape.replaying, and what depends on them goes through tape.once.
 */
export type Computation = (tape: Tape, ...inputs: Tensor[]) => Tensor;

/** y = layer(tape, x); x alone is kept for backward. */
export function recompute(tape: Tape, x: Tensor, layer: Computation): Tensor {
	return new Recomputed(tape, [x], layer).y;
}

/** A value that backward computes again from `inputs`; of what it takes to compute it nothing else is kept. */
export class Recomputed implements Disposable {
	readonly y: Tensor;
	readonly #second: SecondForward | null;

	constructor(
		private readonly tape: Tape,
		inputs: readonly Tensor[],
		compute: Computation,
	) {
		if (!tape.recording) {
			this.y = compute(tape, ...inputs);
			this.#second = null;
			return;
		}
		const kept: Tensor[] = [];
		const { training, replaying } = tape;
		const { earlier } = tape.options;
		const first = new Tape(tape.device, { recording: false, training, replaying, kept, ...(earlier && { earlier }) });
		const value = withoutGradients(inputs, (plain) => compute(first, ...plain));
		const { parameters } = first;
		this.y = tape.output(value, parameters.length > 0 || inputs.some(({ gradient }) => gradient !== null));
		// Gradients of the inputs gather where they would without recomputation: the same sums in the same order.
		const second = new SecondForward(tape, (again) => compute(again, ...inputs), kept);
		this.#second = second;
		tape.record({
			name: "recompute",
			outputs: [this.y],
			keep: inputs.flatMap((input) => [input, input.rowCount]),
			own: [second],
			parameters,
			backward: ([dy]) => second.backward(dy!),
		});
	}

	/**
	 * Gives y's memory back until backward comes to this point of the tape. To be called when everything that reads y forward
	 * is recorded, in the same segment as y.
	 */
	drop(): void {
		const { tape, y } = this;
		const second = this.#second;
		if (second === null || y.gradient === null) return;
		const { allocation } = y;
		tape.onReturn("compute again", () => allocation.resumeFrom(second.y.allocation));
		allocation.suspend();
	}

	[Symbol.dispose](): void {
		this.y[Symbol.dispose]();
	}
}

/** The second computation of a value, made when its first reader asks for it. */
class SecondForward implements Disposable {
	#made: ReturnType<Tape["computeAgain"]> | null = null;

	constructor(
		private readonly tape: Tape,
		private readonly compute: (again: Tape) => Tensor,
		/** Owned: what the first forward kept. */
		private readonly kept: Tensor[],
	) {}

	get y(): Tensor {
		this.#made ??= this.tape.computeAgain(this.compute, this.kept);
		return this.#made.y;
	}

	backward(dy: Tensor): void {
		this.y.gradient!.accumulate(dy.share());
		this.#made!.again.backward();
	}

	[Symbol.dispose](): void {
		for (const value of this.kept.splice(0)) value[Symbol.dispose]();
		this.#made?.again.discard();
		this.#made?.y[Symbol.dispose]();
		this.#made = null;
	}
}

/**
 * Keeps the contents of x in the host's memory until backward comes to this point of the tape. To be called when everything that
 * reads x forward is recorded, in the same segment. A second forward, whose backward follows at once, keeps x where it is.
 */
export function offload(tape: Tape, x: Tensor): void {
	if (!tape.recording || tape.replaying) return;
	const copy = tape.device.hostMemory.keep(x.allocation, tape);
	tape.onReturn("return from the host", () => copy.restore(), [copy]);
}

function withoutGradients<Result>(inputs: readonly Tensor[], run: (plain: readonly Tensor[]) => Result): Result {
	const plain = inputs.map((input) => input.withGradient(null));
	try {
		return run(plain);
	} finally {
		for (const tensor of plain) tensor[Symbol.dispose]();
	}
}
