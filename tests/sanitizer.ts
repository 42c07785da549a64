/** Environment in which Bun, which is built without sanitizers, loads the sanitized native library. */
import { existsSync } from "node:fs";
import { join } from "node:path";

/** Whether this process runs on the sanitized library, where a kernel's path counts and not how long it is followed. */
export const sanitized = process.env.ASAN_OPTIONS !== undefined;

/**
 * Environment for a process that loads build/lib-sanitize/libmimo_cpu.so (`bun build.ts sanitize`). LD_PRELOAD: the
 * sanitizers' runtime must be loaded before the program. detect_leaks: Bun keeps memory until it exits; other tests count
 * live bytes. handle_segv: JavaScriptCore handles SIGSEGV itself. allocator_may_return_null: tests ask for absurd sizes.
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
		// Runs without the sanitizers use the processor's best instructions, mostly AVX-512.
		MIMO_CPU_INSTRUCTIONS: "avx2",
	};
}

/** CMake's build folder of the library that the tests load. */
export function buildTree(root: string): string {
	return join(root, "build", process.env.MIMO_CPU_LIBRARY?.includes("lib-sanitize") ? "sanitize" : "cpu");
}
