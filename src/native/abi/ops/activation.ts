/** Generated from cuda/include/mimo/ops/activation.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const Activation = { squaredRelu: 0, swiglu: 1, quickGeglu: 2, geluTanh: 3, geluErf: 4 } as const;
export type ActivationName = keyof typeof Activation;

export const operations = {
	activation_forward: {
		x: "ptr",
		row_probability: "ptr",
		y: "ptr",
		row_count: "ptr",
		rows: "i64",
		width: "i64",
		interleave: "i64",
		clamp: "f32",
		linear_offset: "f32",
		kind: "i32",
		dtype: "i32",
	},
	activation_backward: {
		dy: "ptr",
		x: "ptr",
		row_probability: "ptr",
		dx: "ptr",
		drow_probability: "ptr",
		row_count: "ptr",
		rows: "i64",
		width: "i64",
		interleave: "i64",
		clamp: "f32",
		linear_offset: "f32",
		kind: "i32",
		dtype: "i32",
	},
} as const;
