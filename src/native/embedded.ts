/**
 * Native libraries inside the executable. Run from source, these are files of the build folder; `bun build --compile`
 * puts them into the executable (build.ts decides which: another one is null).
 */
import type { DeviceKind } from "./library.ts";

type Locate = () => Promise<string | null>;

export const embeddedLibraries: Record<DeviceKind, Locate> = {
	cpu: async () => (await import("../../build/lib/libmimo_cpu.so", { with: { type: "file" } })).default,
	// Run from source, the file may not have been built.
	cuda: async () =>
		await import("../../build/lib/libmimo_cuda.so", { with: { type: "file" } }).then(
			(file) => file.default,
			() => null,
		),
};
