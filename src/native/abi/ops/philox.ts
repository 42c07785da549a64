/** Generated from cuda/include/mimo/ops/philox.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const Distribution = { uniform: 0, normal: 1 } as const;
export type DistributionName = keyof typeof Distribution;

export const operations = {
	philox_fill: {
		y: "ptr",
		rows: "i64",
		width: "i64",
		first_row: "i64",
		first_column: "i64",
		full_width: "i64",
		seed: "i64",
		a: "f64",
		b: "f64",
		distribution: "i32",
		dtype: "i32",
	},
	dropout: {
		x: "ptr",
		y: "ptr",
		rows: "i64",
		width: "i64",
		first_row: "i64",
		first_column: "i64",
		full_width: "i64",
		seed: "i64",
		probability: "f32",
		dtype: "i32",
	},
} as const;
