/** How a program that did not start under the sanitizers uses the sanitized native library. */
import { existsSync } from "node:fs";
import { join } from "node:path";

/**
 * Environment for a process that loads build/lib-sanitize/libmimo_cpu.so (`bun build.ts sanitize`). The run time must be
 * there before the process starts, hence LD_PRELOAD; Bun keeps memory until it exits, so leaks are the live-bytes
 * tests' business; JavaScriptCore handles SIGSEGV itself; an absurd size is a test's.
 */
export function sanitizerEnvironment(root: string): Record<string, string> {
	const library = join(root, "build/lib-sanitize/libmimo_cpu.so");
	if (!existsSync(library)) throw new Error("There is no sanitized library: run `bun build.ts sanitize` first.");
	const runtimes = ["libasan.so", "libubsan.so"].map((name) => {
		const path = Bun.spawnSync(["c++", `-print-file-name=${name}`])
			.stdout.toString()
			.trim();
		if (!path.startsWith("/")) throw new Error(`The compiler has no ${name}.`);
		return path;
	});
	return {
		LD_PRELOAD: runtimes.join(" "),
		ASAN_OPTIONS: "detect_leaks=0:handle_segv=0:abort_on_error=1:allocator_may_return_null=1",
		UBSAN_OPTIONS: "print_stacktrace=1",
		MIMO_CPU_LIBRARY: library,
		// The other test runs take the processor's best instructions, mostly AVX-512.
		MIMO_CPU_INSTRUCTIONS: "avx2",
	};
}

/** Where CMake built the library that the tests load, with its objects. */
export function buildTree(root: string): string {
	return join(root, "build", process.env.MIMO_CPU_LIBRARY?.includes("lib-sanitize") ? "sanitize" : "cpu");
}
