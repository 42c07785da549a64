/** Generated from cuda/include/mimo/ops/embedding.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const operations = {
	embedding_forward: {
		table: "ptr",
		ids: "ptr",
		y: "ptr",
		tokens: "i64",
		width: "i64",
		vocabulary_start: "i64",
		vocabulary_rows: "i64",
		dtype: "i32",
	},
	embedding_backward: {
		dy: "ptr",
		ids: "ptr",
		dtable: "ptr",
		tokens: "i64",
		width: "i64",
		vocabulary_start: "i64",
		vocabulary_rows: "i64",
		dtype: "i32",
	},
} as const;
