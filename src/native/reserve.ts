/** Preallocates disk space (fallocate). */
import { dlopen } from "bun:ffi";

let libc: ReturnType<typeof open> | null = null;

function open() {
	return dlopen("libc.so.6", { fallocate: { args: ["i32", "i32", "i64", "i64"], returns: "i32" } });
}

/**
 * Preallocates `bytes` bytes of a file from `position` on, which extends it. Writing is then about twice as fast, because the
 * file system allocates once and not page by page. If the file system cannot, or is full, nothing happens and the writes proceed
 * or fail by themselves.
 */
export function reserve(descriptor: number, position: number, bytes: number): void {
	libc ??= open();
	libc.symbols.fallocate(descriptor, 0, position, bytes);
}
