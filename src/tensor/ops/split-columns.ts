/** Columns of one tensor as several: no copy forward, and one gradient that the parts' consumers fill in place. */
import { GradientSlot } from "../gradient.ts";
import type { Tape } from "../tape.ts";
import { axpby, copyInto, type FloatDtype, type Tensor } from "../tensor.ts";

/** The gradient of the whole, allocated when the first part's consumer asks for its window. */
class WholeGradient implements Disposable {
	#tensor: Tensor | null = null;

	constructor(private readonly of: Tensor) {}

	get tensor(): Tensor {
		this.#tensor ??= this.of.gradient!.target();
		return this.#tensor;
	}

	[Symbol.dispose](): void {
		this.#tensor?.[Symbol.dispose]();
		this.#tensor = null;
	}
}

/**
 * x_TW → parts of `sizes` columns each, Σ sizes = W, in order: windows into x's memory. Backward: whatever computes a
 * part's gradient writes it straight into that part's window of x's gradient; parts without a gradient become zeros.
 */
export function splitColumns(tape: Tape, x: Tensor, sizes: readonly number[]): Tensor[] {
	const total = sizes.reduce((sum, size) => sum + size, 0);
	if (total !== x.width) throw new RangeError(`Parts of ${sizes.join(" + ")} columns do not make up ${x.width}.`);
	const starts = sizes.map((_, index) => sizes.slice(0, index).reduce((sum, size) => sum + size, 0));
	const whole = new WholeGradient(x);
	const window = (index: number) => whole.tensor.columns(starts[index]!, sizes[index]!);
	const parts = sizes.map((size, index) => {
		const part = x.columns(starts[index]!, size);
		if (!tape.recording || x.gradient === null) return part;
		using plain = part;
		return plain.withGradient(new GradientSlot(x.device, plain.shape, x.dtype as FloatDtype, () => window(index)));
	});
	tape.record({
		name: "split_columns",
		outputs: parts,
		own: [whole],
		backward: (gradients) => {
			for (const [index, gradient] of gradients.entries()) {
				using part = window(index);
				if (gradient === null) axpby(part, part, 0, 0);
				else if (gradient.allocation !== part.allocation) copyInto(gradient, part);
			}
			x.gradient!.accumulate(whole.tensor.share());
		},
	});
	return parts;
}
