/** Debian's own shared OpenBLAS with its own threads, against which our products are measured. */
import { dlopen, FFIType } from "bun:ffi";
import { existsSync } from "node:fs";
import type { DeviceMemory } from "../../src/native/memory.ts";
import { addressOf } from "../../src/native/memory.ts";

const places = [
	"/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0",
	"/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
	"/usr/lib64/libopenblas.so.0",
];

export interface Matrix {
	readonly memory: DeviceMemory;
	readonly transposed: boolean;
	/** Elements between rows as stored. */
	readonly stride: number;
}

export interface Openblas {
	readonly name: string;
	setThreads(threads: number): void;
	/** c_MN = a_MK b_KN + beta c, fp32. */
	sgemm(m: number, n: number, k: number, a: Matrix, b: Matrix, beta: number, c: Matrix): void;
}

/**
 * Opens it, or null when it is not installed. To be called after the native library was loaded: that chooses the
 * kernels for this processor through the environment, for both.
 */
export function openOpenblas(): Openblas | null {
	const path = places.find((place) => existsSync(place));
	if (path === undefined) return null;
	const { i32, f32, ptr } = FFIType;
	const { symbols } = dlopen(path, {
		cblas_sgemm: { args: [i32, i32, i32, i32, i32, i32, f32, ptr, i32, ptr, i32, f32, ptr, i32], returns: "void" },
		openblas_set_num_threads: { args: [i32], returns: "void" },
		openblas_get_corename: { args: [], returns: "cstring" },
	});
	const [rowMajor, plain, transposed] = [101, 111, 112];
	const pointer = (matrix: Matrix) => addressOf(matrix.memory) as never;
	const form = (matrix: Matrix) => (matrix.transposed ? transposed : plain);
	return {
		name: `OpenBLAS ${symbols.openblas_get_corename()}`,
		setThreads: (threads) => symbols.openblas_set_num_threads(threads),
		sgemm: (m, n, k, a, b, beta, c) =>
			symbols.cblas_sgemm(
				rowMajor,
				form(a),
				form(b),
				m,
				n,
				k,
				1,
				pointer(a),
				a.stride,
				pointer(b),
				b.stride,
				beta,
				pointer(c),
				c.stride,
			),
	};
}
