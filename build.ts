/**
 * Builds the native libraries and the program. `bun build.ts KIND`:
 *
 *   cpu       the CPU library with this machine's C++ compiler, and dist/mimo with it inside (default)
 *   cuda      the CUDA library for sm_90a (MIMO_CUDA_ARCH names others), and dist/mimo with both inside
 *   release   dist/release/mimo with both inside, which zig links for glibc 2.28 or later: the CPU library from the objects of
 *             the cpu build, the CUDA library for sm_80, sm_90a and sm_100, unless MIMO_CUDA_ARCH names others;
 *             MIMO_CUDA_OPTIMIZATION=0 and MIMO_AVX512_OPTIMIZATION=2 are for checks that it compiles
 *   sanitize  the CPU library under ASan and UBSan, in build/lib-sanitize; `bun tests/run.ts --sanitize` uses it
 *   tables    the files generated from the headers of the ABI: src/native/abi.ts, cuda/common/operations.def
 *   tools     the downloads that a release build needs
 *
 * A library or program whose inputs are unchanged is not built again. As root the build installs missing Debian packages;
 * otherwise it fails and prints the command that installs them.
 */
import { existsSync, mkdirSync, readFileSync, realpathSync, renameSync, symlinkSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { tables } from "./cuda/include/tables.ts";
import { workerModules } from "./src/system/worker.ts";

/** Oldest glibc that a release runs on: that of RHEL 8. tests/build/release.test.ts checks the release against it. */
const glibcFloor = "2.28";
/** Wheel of PyPI; later versions are not tested. */
const zigWheel = "ziglang==0.15.2";
/** Wheels with nvcc and CUDA's headers, for machines without a CUDA 13 toolkit. */
const toolkitWheels = [
	"nvidia-cuda-nvcc==13.0.88",
	"nvidia-nvvm==13.0.88",
	"nvidia-cuda-crt==13.0.88",
	"nvidia-cuda-cccl==13.0.85",
	"nvidia-cuda-runtime==13.0.96",
	"nvidia-cublas==13.1.0.3",
];
/** Wheels with headers that CUDA toolkits do not have. */
const headerWheels = ["nvidia-cudnn-cu13==9.19.0.56", "nvidia-nccl-cu13==2.28.9", "nvidia-cudnn-frontend==1.27.0"];

const root = import.meta.dir;
/** Linker of releases, which makeLinker writes. */
const linker = join(root, "build/tools/zig-cc");

const kinds: Readonly<Record<string, () => Promise<void>>> = {
	cpu: async () => {
		const library = await buildLibrary("cpu", cpuOptions());
		install(library, join(root, "build/lib/libmimo_cpu.so"));
		await compile("dist/mimo", "build/lib");
	},
	cuda: async () => {
		install(await buildLibrary("cpu", cpuOptions()), join(root, "build/lib/libmimo_cpu.so"));
		const library = await buildLibrary("cuda", cudaOptions("90a"), "cuda");
		install(library, join(root, "build/lib/libmimo_cuda.so"));
		await compile("dist/mimo", "build/lib", ["cpu", "cuda"]);
	},
	release: async () => {
		makeLinker();
		const cuda = { ...cudaOptions("80;90a;100"), MIMO_CUDA_UNITY: "ON", MIMO_LINKER: linker };
		const [cpuLibrary, cudaLibrary] = await Promise.all([
			buildLibrary("cpu", cpuOptions(), "release"),
			buildLibrary("cuda-release", cuda, "cuda"),
		]);
		install(cpuLibrary, join(root, "build/lib-release/libmimo_cpu.so"));
		install(cudaLibrary, join(root, "build/lib-release/libmimo_cuda.so"));
		await compile("dist/release/mimo", "build/lib-release", ["cpu", "cuda"]);
	},
	sanitize: async () => {
		const library = await buildLibrary("sanitize", { ...cpuOptions(), MIMO_SANITIZE: "ON" });
		install(library, join(root, "build/lib-sanitize/libmimo_cpu.so"));
	},
	tables: async () => writeTables(),
	tools: async () => {
		makeLinker();
		cudaOptions("");
	},
};

function fail(sentence: string, exitCode = 1): never {
	process.stderr.write(`build: ${sentence}\n`);
	process.exit(exitCode);
}

/** Runs a command and returns its stdout; on failure prints its output and ends the build. `task` names it in the error. */
function run(command: readonly string[], task: string, env: Record<string, string> = {}): string {
	const result = Bun.spawnSync([...command], {
		cwd: root,
		stdout: "pipe",
		stderr: "pipe",
		env: { ...process.env, ...env },
	});
	if (!result.success) {
		process.stderr.write(`${result.stdout}${result.stderr}\n`);
		fail(`${task} failed (${command.join(" ")}).`);
	}
	return result.stdout.toString();
}

/** Installs missing Debian packages as root; otherwise fails with the command that does. Each has a test of its presence. */
function requirePackages(packages: Readonly<Record<string, () => boolean>>): void {
	const missing = Object.entries(packages).flatMap(([name, isPresent]) => (isPresent() ? [] : [name]));
	if (missing.length === 0) return;
	const install = ["apt-get", "install", "-y", "--no-install-recommends", ...missing];
	if (process.getuid?.() !== 0 || !Bun.which("apt-get")) {
		fail(`${missing.join(", ")} missing. Run: sudo ${install.join(" ")}`);
	}
	process.stderr.write(`build: installing ${missing.join(", ")}\n`);
	// apt-get fails while another build runs it.
	mkdirSync(join(root, "build"), { recursive: true });
	const lock = ["flock", "build/packages.lock"];
	run([...lock, "apt-get", "update", "-qq"], "apt-get update");
	run([...lock, ...install, "-qq"], "apt-get install", { DEBIAN_FRONTEND: "noninteractive" });
	const absent = missing.filter((name) => !packages[name]!());
	if (absent.length > 0) fail(`${absent.join(", ")} cannot be found although apt-get installed it.`);
}

/** Path of the static OpenBLAS: MIMO_OPENBLAS, or the path of Debian's or Fedora's package. */
function findOpenblas(): string | undefined {
	const places = [
		"/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.a",
		"/usr/lib/x86_64-linux-gnu/libopenblas.a",
		"/usr/lib64/libopenblas.a",
		"/usr/lib/libopenblas.a",
	];
	return process.env.MIMO_OPENBLAS ?? places.find((place) => existsSync(place));
}

/** Debian packages of the static libraries that decode images. Linkers need a library before its dependencies. */
const imageLibraries = {
	"libjpeg-dev": ["libjpeg.a"],
	"libwebp-dev": ["libwebpdemux.a", "libwebp.a"],
	"libgif-dev": ["libgif.a"],
	"libdeflate-dev": ["libdeflate.a"],
} as const;

function findLibrary(name: string): string | undefined {
	const folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"];
	return folders.map((folder) => join(folder, name)).find((path) => existsSync(path));
}

/** CMake's option for the static libraries that decode images: MIMO_IMAGE_LIBRARIES, or Debian's. */
function imageOptions(): Record<string, string> {
	const given = process.env.MIMO_IMAGE_LIBRARIES;
	if (given) return { MIMO_IMAGE_LIBRARIES: given };
	requirePackages(
		Object.fromEntries(
			Object.entries(imageLibraries).map(([name, files]) => [
				name,
				() => files.every((file) => findLibrary(file) !== undefined),
			]),
		),
	);
	return {
		MIMO_IMAGE_LIBRARIES: Object.values(imageLibraries)
			.flat()
			.map((file) => findLibrary(file)!)
			.join(";"),
	};
}

/** CMake's options for a build with this machine's compiler. */
function cpuOptions(): Record<string, string> {
	requirePackages({
		cmake: () => Bun.which("cmake") !== null,
		"ninja-build": () => Bun.which("ninja") !== null,
		"g++": () => Bun.which("c++") !== null || Bun.which("g++") !== null,
		"libopenblas-dev": () => findOpenblas() !== undefined,
	});
	return {
		CMAKE_BUILD_TYPE: "Release",
		MIMO_AVX512_OPTIMIZATION: process.env.MIMO_AVX512_OPTIMIZATION || "3",
		OPENBLAS: findOpenblas()!,
		MIMO_LINKER: linker,
		...imageOptions(),
	};
}

/** Writes the linker of releases: zig's C compiler, which links against the symbols of the oldest glibc. */
function makeLinker(): void {
	const zig = join(fetchWheels([zigWheel]), "ziglang/zig");
	const cache = join(root, "build/tools/zig-cache");
	const target = `x86_64-linux-gnu.${glibcFloor}`;
	const text = `#!/bin/sh\nZIG_GLOBAL_CACHE_DIR='${cache}' exec '${zig}' cc -target ${target} "$@"\n`;
	install(Buffer.from(text), linker, 0o755);
}

/** CMake's options for the CUDA library. Its build needs neither a GPU nor cuBLAS, cuDNN or NCCL themselves. */
function cudaOptions(architectures: string): Record<string, string> {
	requirePackages({
		cmake: () => Bun.which("cmake") !== null,
		"ninja-build": () => Bun.which("ninja") !== null,
		"g++": () => Bun.which("g++") !== null,
	});
	const toolkit = findToolkit() ?? join(fetchWheels(toolkitWheels), "nvidia/cu13");
	// nvcc looks for the CUDA runtime in lib64.
	if (!existsSync(join(toolkit, "lib64"))) symlinkSync("lib", join(toolkit, "lib64"));
	const headers = fetchWheels(headerWheels);
	return {
		CMAKE_BUILD_TYPE: "Release",
		MIMO_CUDA: "ON",
		MIMO_CUDA_ARCH: process.env.MIMO_CUDA_ARCH || architectures,
		MIMO_CUDA_OPTIMIZATION: process.env.MIMO_CUDA_OPTIMIZATION || "3",
		CMAKE_CUDA_COMPILER: join(toolkit, "bin/nvcc"),
		...imageOptions(),
		MIMO_CUDA_INCLUDE: ["nvidia/cudnn/include", "nvidia/nccl/include", "include"]
			.map((folder) => join(headers, folder))
			.join(";"),
	};
}

/** Folder of this machine's CUDA 13 toolkit: CUDA_HOME, or that of the nvcc on the PATH. */
function findToolkit(): string | undefined {
	const onPath = Bun.which("nvcc");
	const home = process.env.CUDA_HOME ?? (onPath === null ? undefined : dirname(dirname(realpathSync(onPath))));
	if (home === undefined) return undefined;
	const version = Bun.spawnSync([join(home, "bin/nvcc"), "--version"]);
	return version.success && / release 13\./.test(version.stdout.toString()) ? home : undefined;
}

/** Unpacks wheels of exactly these versions into a folder of build/tools unless it exists; returns the folder. */
function fetchWheels(requirements: readonly string[]): string {
	const [first, ...more] = requirements;
	const digest = more.length === 0 ? "" : `-${Bun.hash(more.join(" ")).toString(16)}`;
	const folder = join(root, "build/tools", first!.replace("==", "-") + digest);
	if (existsSync(folder)) return folder;
	const hasPip = () => Bun.spawnSync(["python3", "-m", "pip", "--version"]).success;
	requirePackages({
		python3: () => Bun.which("python3") !== null,
		"python3-pip": () => Bun.which("python3") !== null && hasPip(),
	});
	process.stderr.write(`build: fetching ${requirements.join(", ")}\n`);
	const quiet = ["--quiet", "--disable-pip-version-check", "--root-user-action=ignore", "--no-compile"];
	const onlyThese = [...quiet, "--no-deps", "--only-binary=:all:"];
	const target = `${folder}.part`;
	run(
		["python3", "-m", "pip", "install", ...onlyThese, "--target", target, ...requirements],
		`fetching ${requirements.join(", ")}`,
	);
	renameSync(target, folder);
	return folder;
}

/** Writes the files generated from the headers of the ABI. */
function writeTables(): void {
	for (const [path, text] of tables()) install(Buffer.from(text), join(root, path));
}

/** Running builds: when a library fails to compile, the other's build ends too. */
const compiling = new Set<Bun.Subprocess>();

/** Path of the library that ninja's target mimo_TARGET builds, from the build folder. */
const targetPaths = { cpu: "cpu/libmimo_cpu.so", release: "link/libmimo_cpu.so", cuda: "gpu/libmimo_cuda.so" } as const;

/** Digest of what a library is built from: the native sources, CMake's options and the static libraries. */
function nativeDigest(flags: readonly string[]): string {
	const hash = new Bun.CryptoHasher("sha256");
	const files = [...new Bun.Glob("cuda/**/*").scanSync(root)].sort().map((file) => [file, join(root, file)]);
	const libraries = flags.flatMap((flag) => flag.split(/[=;]/)).filter((path) => path.endsWith(".a"));
	for (const [name, path] of [...files, ...libraries.map((path) => [path, path])] as [string, string][]) {
		hash.update(`${name}\0`).update(readFileSync(path));
	}
	// The same in a clone that was moved.
	return hash.update(flags.join("\n").replaceAll(root, "")).digest("hex");
}

/** Configures and builds a library in build/FOLDER, unless it exists and its sources are unchanged; returns its path. */
async function buildLibrary(
	folder: string,
	options: Readonly<Record<string, string>>,
	target: keyof typeof targetPaths = "cpu",
): Promise<string> {
	writeTables();
	const tree = join("build", folder);
	const flags = Object.entries(options).map(([name, value]) => `-D${name}=${value}`);
	const library = join(root, tree, targetPaths[target]);
	const digest = nativeDigest(flags);
	const digestRecord = join(root, tree, `${target}.digest`);
	if (existsSync(library) && existsSync(digestRecord) && readFileSync(digestRecord, "utf8") === digest) return library;
	// Flags and folder of the latest configuration: CMake's cache holds absolute paths.
	const record = join(root, tree, "configured.txt");
	const recorded = [root, ...flags].join("\n");
	if (!existsSync(record) || readFileSync(record, "utf8") !== recorded) {
		// CMake's cache would keep options that are no longer given.
		if (existsSync(join(root, tree, "CMakeCache.txt"))) run(["rm", "-rf", tree], "clearing the build folder");
		run(["cmake", "-S", "cuda", "-B", tree, "-G", "Ninja", ...flags], "configuring the native library");
		writeFileSync(record, recorded);
	}
	const command = ["ninja", "-C", tree, `mimo_${target}`];
	const ninja = Bun.spawn(command, { cwd: root, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
	compiling.add(ninja);
	const [stdout, stderr] = await Promise.all([ninja.stdout.text(), ninja.stderr.text(), ninja.exited]);
	compiling.delete(ninja);
	if (ninja.exitCode !== 0) {
		for (const other of compiling) other.kill();
		process.stderr.write(`${stdout}${stderr}\n`);
		fail(`compiling the native library failed (${command.join(" ")}).`);
	}
	writeFileSync(digestRecord, digest);
	return library;
}

/** Writes a file only when its bytes differ: a newer file would make its dependents build again. */
function install(from: string | Buffer, to: string, mode = 0o644): void {
	const bytes = typeof from === "string" ? readFileSync(from) : from;
	if (existsSync(to) && readFileSync(to).equals(bytes)) return;
	mkdirSync(dirname(to), { recursive: true });
	writeFileSync(`${to}.part`, bytes, { mode });
	renameSync(`${to}.part`, to);
}

/** The commit of the sources, with "+" after it where files differ from it; "unknown" outside a clone. */
function commit(): string {
	const git = (...command: string[]) => Bun.spawnSync(["git", ...command], { cwd: root });
	if (!Bun.which("git")) return "unknown";
	const head = git("rev-parse", "--short=12", "HEAD");
	if (!head.success) return "unknown";
	return head.stdout.toString().trim() + (git("status", "--porcelain").stdout.length > 0 ? "+" : "");
}

/** SHA-256 of everything that goes into the executable. */
async function sourceDigest(libraries: readonly string[], defines: Readonly<Record<string, string>>): Promise<string> {
	const hash = new Bun.CryptoHasher("sha256").update(JSON.stringify(defines)).update(Bun.version);
	const sources = [...new Bun.Glob("{src,examples}/**/*").scanSync(root), ...libraries];
	for (const file of [...sources.sort(), "build.ts", "package.json", "package-lock.json"]) {
		hash.update(`${file}\0`).update(await Bun.file(join(root, file)).arrayBuffer());
	}
	return hash.digest("hex");
}

/**
 * The sources import the libraries of build/lib. This resolves an import to the library of that name in `folder`, or to null
 * where the executable is to have no such library.
 */
function libraryPlugin(folder: string, libraries: readonly string[]): Bun.BunPlugin {
	return {
		name: "native libraries",
		setup: (build) => {
			build.onResolve({ filter: /\/build\/lib\/lib\w+\.so$/ }, ({ path }) => {
				const library = join(folder, basename(path));
				if (libraries.includes(library)) return { path: join(root, library) };
				return { path: basename(path), namespace: "absent-library" };
			});
			build.onLoad({ filter: /./, namespace: "absent-library" }, () => ({
				contents: "export default null;",
				loader: "js",
			}));
		},
	};
}

/** Compiles the program and the libraries of a folder into one executable, which needs no other file to start. */
async function compile(executable: string, folder: string, kinds: readonly string[] = ["cpu"]): Promise<void> {
	const { version } = (await Bun.file(join(root, "package.json")).json()) as { version: string };
	const define = { MIMO_VERSION: JSON.stringify(version), MIMO_COMMIT: JSON.stringify(commit()) };
	const libraries = kinds.map((kind) => `${folder}/libmimo_${kind}.so`);
	const digest = await sourceDigest(libraries, define);
	// Digest of the sources of the existing executable.
	const record = join(root, "build", `${executable.replaceAll("/", "-")}.digest`);
	const outfile = join(root, executable);
	if (existsSync(outfile) && existsSync(record) && readFileSync(record, "utf8") === digest) return;
	// Renamed when complete. A folder for each: dist/mimo and dist/release/mimo may be compiled at once, and the file's name
	// shows in the arguments of the running program.
	const unfinished = join(root, "build/unfinished", executable);
	const result = await Bun.build({
		entrypoints: ["main", ...workerModules].map((module) => join(root, `src/${module}.ts`)),
		// Names of entry points are relative to it; Bun's own guess depends on their order.
		root: join(root, "src"),
		target: "bun",
		format: "esm",
		minify: { syntax: true, whitespace: true, identifiers: false },
		bytecode: true,
		define,
		plugins: [libraryPlugin(folder, libraries)],
		compile: {
			// The running Bun: for a target given by name Bun may download another.
			executablePath: process.execPath,
			outfile: unfinished,
			autoloadDotenv: false,
			autoloadBunfig: false,
			autoloadTsconfig: false,
			autoloadPackageJson: false,
		} as never,
		throw: false,
	});
	if (!result.success) fail(`compiling ${executable} failed:\n${result.logs.join("\n")}`);
	mkdirSync(dirname(outfile), { recursive: true });
	renameSync(unfinished, outfile);
	writeFileSync(record, digest);
}

const [kind = "cpu", ...more] = process.argv.slice(2);
if (kinds[kind] === undefined || more.length > 0) {
	fail(`it takes one of ${Object.keys(kinds).join(", ")}, not "${[kind, ...more].join(" ")}".`, 2);
}
await kinds[kind]();
