/** Generated from cuda/include/mimo/ops/spmm.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const operations = {
	spmm: {
		x: "ptr",
		offsets: "ptr",
		columns: "ptr",
		values: "ptr",
		y: "ptr",
		rows: "i64",
		width: "i64",
		x_stride: "i64",
		y_stride: "i64",
		accumulate: "i32",
		x_dtype: "i32",
		y_dtype: "i32",
	},
} as const;
