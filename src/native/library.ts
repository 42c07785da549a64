/** Finds and opens a native library and checks that it speaks this program's ABI. */
import { dlopen, type FFIFunction } from "bun:ffi";
import { existsSync, readlinkSync } from "node:fs";
import { debug } from "../system/debug.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { ABI_VERSION, functions, operations } from "./abi.ts";

export type DeviceKind = "cpu" | "cuda";

/** Any C function of the library; arguments are numbers, typed arrays or null. */
export type NativeFunction = (...args: (number | bigint | NodeJS.TypedArray | null)[]) => unknown;

export interface Library {
	readonly kind: DeviceKind;
	/** File it was loaded from, or "embedded". */
	readonly source: string;
	/** Versions of its parts; those of CUDA are opened to be asked. */
	readonly versions: string;
	readonly symbols: Readonly<Record<string, NativeFunction>>;
}

function signatures(): Record<string, FFIFunction> {
	const table: Record<string, FFIFunction> = {};
	for (const [name, { args, returns }] of Object.entries(functions)) table[name] = { args: [...args], returns };
	for (const name of Object.keys(operations)) table[`mimo_${name}`] = { args: ["ptr", "ptr"], returns: "i32" };
	return table;
}

/** The functions of a shared library. */
function load(path: string, table: Record<string, FFIFunction>): Record<string, NativeFunction> {
	try {
		return dlopen(path, table).symbols as unknown as Record<string, NativeFunction>;
	} catch (error) {
		// Bun compiles the calls, for which it reserves a large range of addresses when it starts.
		if (!/requires the JIT/.test((error as Error).message)) throw error;
		throw new UserError(
			"Native libraries cannot be called: the system gave no room for the code that does (raise or remove the limit of ulimit -v).",
		);
	}
}

/** Names, for threads and for processes that this one starts, the anonymous file that holds an unpacked library. */
const unpackedVariable = { cpu: "MIMO_UNPACKED_CPU_LIBRARY", cuda: "MIMO_UNPACKED_CUDA_LIBRARY" } as const;

/**
 * Path of the library as an earlier thread, or the process that started this one, has unpacked it; null: it is not
 * unpacked yet.
 */
function unpackedBefore(kind: DeviceKind): string | null {
	const path = process.env[unpackedVariable[kind]];
	if (!path) return null;
	try {
		// Its process lives, and the number of its file has not passed to another.
		return readlinkSync(path).startsWith("/memfd:libmimo") ? path : null;
	} catch {
		return null;
	}
}

/**
 * A path that dlopen accepts for a file inside the executable: the bytes go to an anonymous file, so that nothing is
 * written to disk and nothing is left behind. A run's ranks and threads share one, and its memory.
 */
async function pathOfEmbedded(kind: DeviceKind, embedded: string): Promise<string> {
	const known = unpackedBefore(kind);
	if (known !== null) return known;
	const libc = load("libc.so.6", { memfd_create: { args: ["cstring", "u32"], returns: "i32" } });
	const fd = libc.memfd_create!(Buffer.from("libmimo\0"), 0) as number;
	if (fd < 0) throw new UserError("The system refused an anonymous file (memfd_create) for the embedded library.");
	// Not through a buffer of this program: every process of a run would touch as much memory once more.
	const { size } = Bun.file(embedded);
	const written = await Bun.write(Bun.file(fd), Bun.file(embedded)).catch((error: NodeJS.ErrnoException) => {
		const why = error.code === "EFBIG" ? "files may not be that large here (ulimit -f)" : error.message;
		throw new UserError(`The embedded library of ${size} bytes cannot be unpacked: ${why}.`);
	});
	if (written !== size) throw new UserError(`The embedded library could not be unpacked: ${written} of ${size} bytes.`);
	const path = `/proc/${process.pid}/fd/${fd}`;
	process.env[unpackedVariable[kind]] = path;
	return path;
}

async function locate(kind: DeviceKind): Promise<{ path: string; source: string }> {
	const override = process.env[`MIMO_${kind.toUpperCase()}_LIBRARY`];
	if (override) {
		if (!existsSync(override)) {
			throw new UserError(`MIMO_${kind.toUpperCase()}_LIBRARY names ${override}, which does not exist.`);
		}
		return { path: override, source: override };
	}
	const file = await embeddedLibraries[kind]();
	if (file === null || !existsSync(file)) {
		throw new UserError(
			`The native ${kind} library is not there: build it with \`npm run build${kind === "cuda" ? ":cuda" : ""}\`, or name a built one in MIMO_${kind.toUpperCase()}_LIBRARY.`,
		);
	}
	return file.startsWith("/$bunfs/")
		? { path: await pathOfEmbedded(kind, file), source: "embedded" }
		: { path: file, source: file };
}

/**
 * Environment variables that the CPU library reads, with the values it knows: the largest instruction set it may use, and
 * OpenBLAS's kernels for processors with AVX2 and FMA.
 */
const libraryVariables: Readonly<Record<string, readonly string[]>> = {
	MIMO_CPU_INSTRUCTIONS: ["sse2", "avx2", "avx512"],
	MIMO_OPENBLAS_CORETYPE: ["Haswell", "Zen", "SkylakeX", "Cooperlake"],
};

/** Throws a UserError for a value of `libraryVariables` that the library would silently ignore. */
function requireKnownVariables(): void {
	for (const [name, allowed] of Object.entries(libraryVariables)) {
		const value = process.env[name] ?? "";
		if (value === "" || allowed.includes(value)) continue;
		throw new UserError(`${name} is ${JSON.stringify(value)}; allowed is ${allowed.join(", ")}.`, exitCodes.usage);
	}
}

/** Opens the library for a kind of device. Throws a UserError when it is absent, broken or of another version. */
export async function openLibrary(kind: DeviceKind): Promise<Library> {
	requireKnownVariables();
	const { path, source } = await locate(kind);
	let symbols: Record<string, NativeFunction>;
	try {
		symbols = load(path, signatures());
	} catch (error) {
		if (error instanceof UserError) throw error;
		throw new UserError(`The native library ${source} cannot be loaded: ${(error as Error).message}.`);
	}
	const version = symbols.mimo_abi_version!() as number;
	if (version !== ABI_VERSION) {
		throw new UserError(`The native library ${source} has ABI version ${version}; this program needs ${ABI_VERSION}.`);
	}
	debug(1, `native library ${source}`);
	return {
		kind,
		source,
		get versions() {
			return String(symbols.mimo_library_versions!());
		},
		symbols,
	};
}

// Native libraries inside the executable. Run from source, these are files of the build folder; `bun build --compile`
// puts them into the executable (build.ts decides which: another one is null).

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
