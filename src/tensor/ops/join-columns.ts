/** Several tensors side by side. */
import type { Tape } from "../tape.ts";
import { copyInto, type FloatDtype, Tensor } from "../tensor.ts";

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
