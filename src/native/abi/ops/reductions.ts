/** Generated from cuda/include/mimo/ops/reductions.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const operations = {
	column_sum: { dy: "ptr", dbias: "ptr", row_count: "ptr", rows: "i64", width: "i64", stride: "i64", dtype: "i32" },
	masked_sum: { x: "ptr", mask: "ptr", sum: "ptr", count: "ptr", elements: "i64" },
	sum_of_squares: { x: "ptr", sum: "ptr", elements: "i64", dtype: "i32" },
	count_zeros: { x: "ptr", count: "ptr", elements: "i64" },
	find_nonfinite: { x: "ptr", flag: "ptr", elements: "i64", dtype: "i32" },
} as const;
