/** Generated from cuda/include/mimo/ops/elementwise.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const operations = {
	axpby: {
		x: "ptr",
		y: "ptr",
		row_count: "ptr",
		rows: "i64",
		width: "i64",
		x_stride: "i64",
		y_stride: "i64",
		alpha: "f32",
		beta: "f32",
		x_dtype: "i32",
		y_dtype: "i32",
	},
	add: { a: "ptr", b: "ptr", y: "ptr", elements: "i64", dtype: "i32" },
	fill: { y: "ptr", elements: "i64", value: "f64", dtype: "i32" },
	scale: { x: "ptr", factor: "ptr", elements: "i64" },
} as const;
