/** Y = A + B: the residual connection. */
import { ResidualSum } from "../residual-sum.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";

/**
 * y = a + b, fp32 sum, one rounding. a, b: contiguous, of one shape and storage type. Both gradients are y's own, shared
 * and not copied.
 */
export function add(tape: Tape, a: Tensor, b: Tensor): Tensor {
	using sum = addLater(tape, a, b);
	return sum.written().share();
}

/** a + b, which the norm that reads it may write. */
export function addLater(tape: Tape, a: Tensor, b: Tensor): ResidualSum {
	if (a.elements !== b.elements || a.dtype !== b.dtype || !a.contiguous || !b.contiguous) {
		throw new RangeError(
			`add takes contiguous tensors of one kind, not ${a.dtype} [${a.shape}], ${b.dtype} [${b.shape}].`,
		);
	}
	const y = tape.output(Tensor.empty(tape.device, a.shape, a.dtype), a.gradient !== null || b.gradient !== null);
	tape.record({
		name: "add",
		outputs: [y],
		backward: ([dy]) => {
			a.gradient?.accumulate(dy!.share());
			b.gradient?.accumulate(dy!.share());
		},
	});
	return ResidualSum.later(y, { residual: a, branch: b, mask: null }, (sum, { residual, branch }) =>
		tape.device.run("add", { a: residual, b: branch, y: sum, elements: sum.elements, dtype: sum.dtypeCode }),
	);
}
