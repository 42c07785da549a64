/** Generated from cuda/include/mimo/hosts.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const HOST_FAN_OUT = 32;

export const functions = {
	mimo_run_create_part: { args: ["i32", "ptr", "i32", "i64", "ptr", "ptr"], returns: "i32" },
	mimo_run_relay: { args: ["ptr", "ptr", "ptr", "i32", "ptr", "ptr"], returns: "i32" },
	mimo_run_outlook: { args: ["ptr", "ptr", "ptr", "ptr"], returns: "i32" },
	mimo_run_relayed: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
	mimo_run_settle: { args: ["ptr"], returns: "i32" },
} as const;
