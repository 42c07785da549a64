/** Generated from cuda/include/mimo/collectives.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const Backend = { nccl: 0, shm: 1 } as const;
export type BackendName = keyof typeof Backend;
export const Reduction = { sum: 0, max: 1 } as const;
export type ReductionName = keyof typeof Reduction;

export const functions = {
	mimo_run_set_backend: { args: ["ptr", "ptr", "i32"], returns: "i32" },
	mimo_group_create: { args: ["ptr", "ptr", "ptr", "i32", "ptr"], returns: "i32" },
	mimo_group_destroy: { args: ["ptr"], returns: "i32" },
	mimo_group_wait: { args: ["ptr", "ptr", "i64"], returns: "i32" },
	mimo_group_all_reduce: { args: ["ptr", "ptr", "ptr", "i64", "i32", "i32", "ptr"], returns: "i32" },
	mimo_group_reduce_scatter: { args: ["ptr", "ptr", "ptr", "ptr", "i64", "i32", "ptr"], returns: "i32" },
	mimo_group_all_gather: { args: ["ptr", "ptr", "ptr", "ptr", "i64", "ptr"], returns: "i32" },
	mimo_group_broadcast: { args: ["ptr", "ptr", "ptr", "i64", "i32", "ptr"], returns: "i32" },
	mimo_group_all_to_all: { args: ["ptr", "ptr", "ptr", "ptr", "ptr", "i64", "ptr"], returns: "i32" },
	mimo_group_send: { args: ["ptr", "ptr", "ptr", "i64", "i32", "ptr"], returns: "i32" },
	mimo_group_receive: { args: ["ptr", "ptr", "ptr", "i64", "i32", "ptr"], returns: "i32" },
	mimo_group_barrier: { args: ["ptr"], returns: "i32" },
	mimo_group_exchange: { args: ["ptr", "ptr", "ptr", "i64"], returns: "i32" },
} as const;
