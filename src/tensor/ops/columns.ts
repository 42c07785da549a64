/**
 * Columns of one tensor as several: no copy forward, and one gradient that the parts' consumers fill in place. And the reverse,
 * several tensors side by side. And a tensor in another shape.
 */
import { GradientSlot } from "../gradient.ts";
import type { Tape } from "../tape.ts";
import { axpby, contiguous, copyInto, type FloatDtype, Tensor } from "../tensor.ts";

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

/** Parts x_TW of equal rows and dtype → y_T(ΣW), their columns in order. Backward: each part's columns of the gradient. */
export function joinColumns(tape: Tape, parts: readonly Tensor[]): Tensor {
	const { rows, dtype } = parts[0]!;
	const width = parts.reduce((sum, part) => sum + part.width, 0);
	const wanted = parts.some(({ gradient }) => gradient !== null);
	const y = tape.output(Tensor.empty(tape.device, [rows, width], dtype as FloatDtype), wanted);
	const starts = parts.map((_, index) => parts.slice(0, index).reduce((sum, part) => sum + part.width, 0));
	for (const [index, part] of parts.entries()) {
		using columns = y.columns(starts[index]!, part.width);
		copyInto(part, columns);
	}
	tape.record({
		name: "join_columns",
		outputs: [y],
		backward: ([dy]) => {
			for (const [index, { gradient, width: own }] of parts.entries()) {
				if (gradient === null) continue;
				const dx = gradient.target();
				using columns = dy!.columns(starts[index]!, own);
				copyInto(columns, dx);
				gradient.accumulate(dx);
			}
		},
	});
	return y;
}

/** x, contiguous, in another shape of as many elements: the same memory. Backward: the gradient in x's shape. */
export function reshape(tape: Tape, x: Tensor, shape: readonly number[]): Tensor {
	using seen = x.view(shape);
	const y = tape.output(seen.withGradient(null), x.gradient !== null);
	tape.record({
		name: "reshape",
		outputs: [y],
		backward: ([dy]) => {
			using whole = contiguous(dy!);
			x.gradient!.accumulate(whole.view(x.shape));
		},
	});
	return y;
}
