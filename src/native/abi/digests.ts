/** Generated from cuda/include/mimo/digests.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const functions = {
	mimo_digests_open: { args: ["i32", "i64", "i32", "ptr"], returns: "i32" },
	mimo_digests_range: { args: ["ptr", "i64"], returns: "i32" },
	mimo_digests_written: { args: ["ptr", "i64"], returns: "i32" },
	mimo_digests_wait: { args: ["ptr", "ptr", "i64"], returns: "i32" },
	mimo_digests_close: { args: ["ptr"], returns: "i32" },
} as const;
