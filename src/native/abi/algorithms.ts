/** Generated from cuda/include/mimo/algorithms.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const functions = {
	mimo_device_set_algorithms: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_device_time_algorithms: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
	mimo_device_timed_algorithms: { args: ["ptr", "ptr", "i64", "ptr"], returns: "i32" },
} as const;
