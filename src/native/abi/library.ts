/** Generated from cuda/include/mimo/library.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const ABI_VERSION = 20;

export const Status = {
	ok: 0,
	argument: 1,
	outOfMemory: 2,
	unsupported: 3,
	device: 4,
	internal: 5,
	peer: 6,
	data: 7,
} as const;
export type StatusName = keyof typeof Status;
export const Dtype = { f32: 0, bf16: 1, i32: 2, u8: 3, f64: 4 } as const;
export type DtypeName = keyof typeof Dtype;

export const functions = {
	mimo_abi_version: { args: [], returns: "i32" },
	mimo_library_kind: { args: [], returns: "cstring" },
	mimo_library_versions: { args: [], returns: "cstring" },
	mimo_last_error: { args: [], returns: "cstring" },
} as const;
