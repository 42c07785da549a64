/** Generated from cuda/include/mimo/device.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const structs = {
	device_info: {
		name: ["char", 128],
		instructions: ["char", 64],
		memory_bytes: "i64",
		threads: "i32",
		device_count: "i32",
	},
} as const;

export const functions = {
	mimo_device_count: { args: ["ptr"], returns: "i32" },
	mimo_device_open: { args: ["i32", "i32", "ptr"], returns: "i32" },
	mimo_device_close: { args: ["ptr"], returns: "i32" },
	mimo_device_describe: { args: ["ptr", "ptr"], returns: "i32" },
	mimo_device_set_deterministic: { args: ["ptr", "i32"], returns: "i32" },
} as const;
