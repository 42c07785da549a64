/** Generated from cuda/include/mimo/run.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const RUN_PATH_BYTES = 64;
export const HOST_BYTES = 64;
export const MODULE_BYTES = 32;
export const COORDINATES_BYTES = 64;
export const SENTENCE_BYTES = 512;

export const RankPhase = { absent: 0, running: 1, finished: 2, failed: 3 } as const;
export type RankPhaseName = keyof typeof RankPhase;
export const Collective = {
	allReduce: 0,
	reduceScatter: 1,
	allGather: 2,
	broadcast: 3,
	allToAll: 4,
	send: 5,
	receive: 6,
	barrier: 7,
	exchange: 8,
	exchangeRows: 9,
} as const;
export type CollectiveName = keyof typeof Collective;
export const CallState = { started: 0, finished: 1, failed: 2 } as const;
export type CallStateName = keyof typeof CallState;

export const structs = {
	rank_state: {
		host: ["char", 64],
		module: ["char", 32],
		coordinates: ["char", 64],
		error: ["char", 512],
		phase: "i64",
		pid: "i64",
		heartbeat: "i64",
		progress: "i64",
		progress_time: "i64",
		step: "i64",
		calls: "i64",
		waiting_call: "i64",
	},
	call_record: {
		group: ["char", 64],
		call: "i64",
		sequence: "i64",
		kind: "i64",
		bytes: "i64",
		state: "i64",
		started: "i64",
		finished: "i64",
		missing_count: "i64",
		missing: ["i64", 16],
	},
} as const;

export const functions = {
	mimo_run_create: { args: ["i32", "i32", "i64", "ptr", "ptr"], returns: "i32" },
	mimo_run_open: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_run_close: { args: ["ptr"], returns: "i32" },
	mimo_run_join: { args: ["ptr", "i32", "i32"], returns: "i32" },
	mimo_run_describe: { args: ["ptr", "i32", "ptr", "ptr"], returns: "i32" },
	mimo_run_progress: { args: ["ptr", "i64"], returns: "i32" },
	mimo_run_leave: { args: ["ptr"], returns: "i32" },
	mimo_run_fail: { args: ["ptr", "i32", "ptr"], returns: "i32" },
	mimo_run_expect: { args: ["ptr", "i32", "i32"], returns: "i32" },
	mimo_run_watch: { args: ["ptr", "ptr", "ptr", "ptr"], returns: "i32" },
	mimo_run_claim_diagnosis: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_run_diagnose: { args: ["ptr", "ptr", "i64"], returns: "i32" },
	mimo_run_print_to: { args: ["ptr", "i32"], returns: "i32" },
	mimo_run_conclude: { args: ["ptr", "i32"], returns: "i32" },
	mimo_run_record: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_run_record_rank: { args: ["ptr", "i32", "ptr"], returns: "i32" },
	mimo_run_read_recordings: { args: ["ptr", "i32", "ptr", "ptr"], returns: "i32" },
	mimo_run_rank_state: { args: ["ptr", "i32", "ptr"], returns: "i32" },
	mimo_run_calls: { args: ["ptr", "i32", "ptr", "i32", "ptr"], returns: "i32" },
	mimo_end_with_parent: { args: ["i32", "i32"], returns: "i32" },
} as const;
