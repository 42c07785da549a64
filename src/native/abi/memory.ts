/** Generated from cuda/include/mimo/memory.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const MemoryTag = {
	parameter: 0,
	gradient: 1,
	optimizer: 2,
	activation: 3,
	workspace: 4,
	data: 5,
	communication: 6,
} as const;
export type MemoryTagName = keyof typeof MemoryTag;

export const structs = {
	memory_statistics: {
		live_bytes: "i64",
		peak_bytes: "i64",
		reserved_bytes: "i64",
		live_blocks: "i64",
		system_allocations: "i64",
		live_bytes_by_tag: ["i64", 7],
		peak_bytes_by_tag: ["i64", 7],
	},
} as const;

export const functions = {
	mimo_memory_allocate: { args: ["ptr", "i64", "i32", "ptr"], returns: "i32" },
	mimo_memory_free: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_memory_statistics_get: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_memory_reset_peak: { args: ["ptr"], returns: "i32" },
	mimo_memory_trim: { args: ["ptr"], returns: "i32" },
	mimo_memory_limit: { args: ["ptr", "i64"], returns: "i32" },
	mimo_memory_copy_to_device: { args: ["ptr", "ptr", "ptr", "i64"], returns: "i32" },
	mimo_memory_copy_to_host: { args: ["ptr", "ptr", "ptr", "i64"], returns: "i32" },
	mimo_memory_copy: { args: ["ptr", "ptr", "ptr", "i64"], returns: "i32" },
	mimo_memory_set_zero: { args: ["ptr", "ptr", "i64"], returns: "i32" },
} as const;
