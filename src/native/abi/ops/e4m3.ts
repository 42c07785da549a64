/** Generated from cuda/include/mimo/ops/e4m3.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const E4M3_SPARE_FACTORS = 260;

export const MlpRecipe = { plain: 0, e4m3Blockwise: 1 } as const;
export type MlpRecipeName = keyof typeof MlpRecipe;

export const operations = {
	e4m3_matrices: {
		matrices: "ptr",
		values: "ptr",
		transposed: "ptr",
		factors: "ptr",
		count: "i64",
		rows: "i64",
		width: "i64",
		dtype: "i32",
	},
	e4m3_rows: { x: "ptr", row_count: "ptr", values: "ptr", factors: "ptr", rows: "i64", width: "i64", dtype: "i32" },
} as const;
