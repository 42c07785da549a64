/**
 * Builds what ships. `bun build.ts KIND`:
 *
 *   cpu       the CPU library by the machine's own C++ compiler, and dist/mimo with it inside (default)
 *   cuda      the CUDA library for sm_90a (MIMO_CUDA_ARCH names others), and dist/mimo with both inside
 *   release   dist/release/mimo with both inside, which zig links for glibc 2.28 or later: the CPU library from the objects of
 *             the cpu build, the CUDA library for sm_80, sm_90a and sm_100, unless MIMO_CUDA_ARCH names others
 *   sanitize  the CPU library under ASan and UBSan, in build/lib-sanitize; `bun tests/run.ts --sanitize` uses it
 *   tables    only writes what follows from the headers of the ABI: src/native/abi.ts, src/native/abi, cuda/common/operations.def
 *   tools     only fetches what release needs to be built
 *
 * A library or program whose inputs are unchanged is not built again. Missing Debian packages are installed when this runs
 * as root, else named.
 */
import {
	existsSync,
	mkdirSync,
	readFileSync,
	realpathSync,
	renameSync,
	rmSync,
	symlinkSync,
	writeFileSync,
} from "node:fs";
import { basename, dirname, join } from "node:path";
import { tables } from "./cuda/include/tables.ts";
import { workerModules } from "./src/system/worker.ts";

/** The oldest glibc of a release: that of RHEL 8. tests/build/release.test.ts holds it to it. */
const glibcFloor = "2.28";
/** From PyPI; later ones are not tried. */
const zigWheel = "ziglang==0.15.2";
/** nvcc and CUDA's headers, for machines without a CUDA 13 toolkit. */
const toolkitWheels = [
	"nvidia-cuda-nvcc==13.0.88",
	"nvidia-nvvm==13.0.88",
	"nvidia-cuda-crt==13.0.88",
	"nvidia-cuda-cccl==13.0.85",
	"nvidia-cuda-runtime==13.0.96",
	"nvidia-cublas==13.1.0.3",
];
/** Headers that toolkits lack. */
const headerWheels = ["nvidia-cudnn-cu13==9.19.0.56", "nvidia-nccl-cu13==2.28.9", "nvidia-cudnn-frontend==1.27.0"];

const root = import.meta.dir;
/** Links a release; made when one is built. */
const linker = join(root, "build/tools/zig-cc");

const kinds: Readonly<Record<string, () => Promise<void>>> = {
	cpu: async () => {
		const library = await buildLibrary("cpu", nativeTools());
		install(library, join(root, "build/lib/libmimo_cpu.so"));
		await compile("dist/mimo", "build/lib");
	},
	cuda: async () => {
		install(await buildLibrary("cpu", nativeTools()), join(root, "build/lib/libmimo_cpu.so"));
		const library = await buildLibrary("cuda", cudaTools("90a"), "cuda");
		install(library, join(root, "build/lib/libmimo_cuda.so"));
		await compile("dist/mimo", "build/lib", ["cpu", "cuda"]);
	},
	release: async () => {
		makeLinker();
		const cuda = { ...cudaTools("80;90a;100"), MIMO_LINKER: linker };
		const [cpuLibrary, cudaLibrary] = await Promise.all([
			buildLibrary("cpu", nativeTools(), "release"),
			buildLibrary("cuda-release", cuda, "cuda"),
		]);
		install(cpuLibrary, join(root, "build/lib-release/libmimo_cpu.so"));
		install(cudaLibrary, join(root, "build/lib-release/libmimo_cuda.so"));
		await compile("dist/release/mimo", "build/lib-release", ["cpu", "cuda"]);
	},
	sanitize: async () => {
		const library = await buildLibrary("sanitize", { ...nativeTools(), MIMO_SANITIZE: "ON" });
		install(library, join(root, "build/lib-sanitize/libmimo_cpu.so"));
	},
	tables: async () => writeTables(),
	tools: async () => {
		makeLinker();
		cudaTools("");
	},
};

function fail(sentence: string, exitCode = 1): never {
	process.stderr.write(`build: ${sentence}\n`);
	process.exit(exitCode);
}

/** Runs a command and returns its output; on failure prints the output and ends the build. */
function run(command: readonly string[], what: string, env: Record<string, string> = {}): string {
	const result = Bun.spawnSync([...command], {
		cwd: root,
		stdout: "pipe",
		stderr: "pipe",
		env: { ...process.env, ...env },
	});
	if (!result.success) {
		process.stderr.write(`${result.stdout}${result.stderr}\n`);
		fail(`${what} failed (${command.join(" ")}).`);
	}
	return result.stdout.toString();
}

/** Makes sure Debian packages are there: installs them as root, otherwise says which line to run. */
function need(packages: Readonly<Record<string, () => boolean>>): void {
	const missing = Object.entries(packages).flatMap(([name, present]) => (present() ? [] : [name]));
	if (missing.length === 0) return;
	const install = ["apt-get", "install", "-y", "--no-install-recommends", ...missing];
	if (process.getuid?.() !== 0 || !Bun.which("apt-get")) {
		fail(`${missing.join(", ")} missing. Run: sudo ${install.join(" ")}`);
	}
	process.stderr.write(`build: installing ${missing.join(", ")}\n`);
	// Another build may be at the same.
	mkdirSync(join(root, "build"), { recursive: true });
	const inTurn = ["flock", "build/packages.lock"];
	run([...inTurn, "apt-get", "update", "-qq"], "apt-get update");
	run([...inTurn, ...install, "-qq"], "apt-get install", { DEBIAN_FRONTEND: "noninteractive" });
	const absent = missing.filter((name) => !packages[name]!());
	if (absent.length > 0) fail(`${absent.join(", ")} cannot be found although apt-get installed it.`);
}

/** The static OpenBLAS: MIMO_OPENBLAS, or where Debian and Fedora put it. */
function findOpenblas(): string | undefined {
	const places = [
		"/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.a",
		"/usr/lib/x86_64-linux-gnu/libopenblas.a",
		"/usr/lib64/libopenblas.a",
		"/usr/lib/libopenblas.a",
	];
	return process.env.MIMO_OPENBLAS ?? places.find((place) => existsSync(place));
}

/** Debian packages and their static libraries that decode images, each before those it needs. */
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

/** The static libraries that decode images: MIMO_IMAGE_LIBRARIES, or Debian's. */
function imageOptions(): Record<string, string> {
	const given = process.env.MIMO_IMAGE_LIBRARIES;
	if (given) return { MIMO_IMAGE_LIBRARIES: given };
	need(
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

/** CMake's options for a build with the machine's own tools. */
function nativeTools(): Record<string, string> {
	need({
		cmake: () => Bun.which("cmake") !== null,
		"ninja-build": () => Bun.which("ninja") !== null,
		"g++": () => Bun.which("c++") !== null || Bun.which("g++") !== null,
		"libopenblas-dev": () => findOpenblas() !== undefined,
	});
	return { CMAKE_BUILD_TYPE: "Release", OPENBLAS: findOpenblas()!, MIMO_LINKER: linker, ...imageOptions() };
}

/** zig's C compiler, whose C library stubs stop at the wanted glibc, as an executable. */
function makeLinker(): void {
	const zig = join(fetchWheels([zigWheel]), "ziglang/zig");
	const cache = join(root, "build/tools/zig-cache");
	const target = `x86_64-linux-gnu.${glibcFloor}`;
	const text = `#!/bin/sh\nZIG_GLOBAL_CACHE_DIR='${cache}' exec '${zig}' cc -target ${target} "$@"\n`;
	install(Buffer.from(text), linker, 0o755);
}

/** CMake's options for the CUDA library: no GPU, and no vendor library, is needed to build it. */
function cudaTools(architectures: string): Record<string, string> {
	need({
		cmake: () => Bun.which("cmake") !== null,
		"ninja-build": () => Bun.which("ninja") !== null,
		"g++": () => Bun.which("g++") !== null,
	});
	const toolkit = findToolkit() ?? join(fetchWheels(toolkitWheels), "nvidia/cu13");
	// Where nvcc looks for the CUDA runtime.
	if (!existsSync(join(toolkit, "lib64"))) symlinkSync("lib", join(toolkit, "lib64"));
	const headers = fetchWheels(headerWheels);
	return {
		CMAKE_BUILD_TYPE: "Release",
		MIMO_CUDA: "ON",
		MIMO_CUDA_ARCH: process.env.MIMO_CUDA_ARCH || architectures,
		CMAKE_CUDA_COMPILER: join(toolkit, "bin/nvcc"),
		...imageOptions(),
		MIMO_CUDA_INCLUDE: ["nvidia/cudnn/include", "nvidia/nccl/include", "include"]
			.map((folder) => join(headers, folder))
			.join(";"),
	};
}

/** A CUDA 13 toolkit of this machine: CUDA_HOME, else the nvcc on the PATH. */
function findToolkit(): string | undefined {
	const onPath = Bun.which("nvcc");
	const home = process.env.CUDA_HOME ?? (onPath === null ? undefined : dirname(dirname(realpathSync(onPath))));
	if (home === undefined) return undefined;
	const version = Bun.spawnSync([join(home, "bin/nvcc"), "--version"]);
	return version.success && / release 13\./.test(version.stdout.toString()) ? home : undefined;
}

/** Unpacks wheels of exactly these versions into a folder of build/tools, once; returns the folder. */
function fetchWheels(requirements: readonly string[]): string {
	const [first, ...more] = requirements;
	const digest = more.length === 0 ? "" : `-${Bun.hash(more.join(" ")).toString(16)}`;
	const folder = join(root, "build/tools", first!.replace("==", "-") + digest);
	if (existsSync(folder)) return folder;
	const hasPip = () => Bun.spawnSync(["python3", "-m", "pip", "--version"]).success;
	need({
		python3: () => Bun.which("python3") !== null,
		"python3-pip": () => Bun.which("python3") !== null && hasPip(),
	});
	process.stderr.write(`build: fetching ${requirements.join(", ")}\n`);
	const quiet = ["--quiet", "--disable-pip-version-check", "--root-user-action=ignore", "--no-compile"];
	const exactly = [...quiet, "--no-deps", "--only-binary=:all:"];
	const target = `${folder}.part`;
	run(
		["python3", "-m", "pip", "install", ...exactly, "--target", target, ...requirements],
		`fetching ${requirements.join(", ")}`,
	);
	renameSync(target, folder);
	return folder;
}

const compiling = new Set<Bun.Subprocess>();

/** Writes the files that follow from the headers of the ABI, and removes those of headers that are gone. */
function writeTables(): void {
	const written = tables();
	for (const [path, text] of written) install(Buffer.from(text), join(root, path));
	for (const path of new Bun.Glob("src/native/abi/**/*.ts").scanSync(root)) {
		if (!written.has(path)) rmSync(join(root, path));
	}
}

/** Library that each target builds, within its folder. */
const built = { cpu: "cpu/libmimo_cpu.so", release: "link/libmimo_cpu.so", cuda: "gpu/libmimo_cuda.so" } as const;

/** Configures and builds a library in build/FOLDER; returns its path. */
async function buildLibrary(
	folder: string,
	options: Readonly<Record<string, string>>,
	kind: keyof typeof built = "cpu",
): Promise<string> {
	writeTables();
	const tree = join("build", folder);
	const flags = Object.entries(options).map(([name, value]) => `-D${name}=${value}`);
	const configured = join(root, tree, "configured.txt");
	const wanted = flags.join("\n");
	if (!existsSync(configured) || readFileSync(configured, "utf8") !== wanted) {
		// Options that are no longer given must not live on in CMake's cache.
		if (existsSync(join(root, tree, "CMakeCache.txt"))) run(["rm", "-rf", tree], "clearing the build folder");
		run(["cmake", "-S", "cuda", "-B", tree, "-G", "Ninja", ...flags], "configuring the native library");
		writeFileSync(configured, wanted);
	}
	const command = ["ninja", "-C", tree, `mimo_${kind}`];
	const ninja = Bun.spawn(command, { cwd: root, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
	compiling.add(ninja);
	const [said, complained] = await Promise.all([ninja.stdout.text(), ninja.stderr.text(), ninja.exited]);
	compiling.delete(ninja);
	if (ninja.exitCode !== 0) {
		for (const other of compiling) other.kill();
		process.stderr.write(`${said}${complained}\n`);
		fail(`compiling the native library failed (${command.join(" ")}).`);
	}
	return join(root, tree, built[kind]);
}

/** Writes a file only when its bytes differ, so that what depends on it is not built again. */
function install(from: string | Buffer, to: string, mode = 0o644): void {
	const bytes = typeof from === "string" ? readFileSync(from) : from;
	if (existsSync(to) && readFileSync(to).equals(bytes)) return;
	mkdirSync(dirname(to), { recursive: true });
	writeFileSync(`${to}.part`, bytes, { mode });
	renameSync(`${to}.part`, to);
}

/** The commit the sources are of, "+" when they were changed since; "unknown" outside a clone. */
function commit(): string {
	const git = (...command: string[]) => Bun.spawnSync(["git", ...command], { cwd: root });
	if (!Bun.which("git")) return "unknown";
	const head = git("rev-parse", "--short=12", "HEAD");
	if (!head.success) return "unknown";
	return head.stdout.toString().trim() + (git("status", "--porcelain").stdout.length > 0 ? "+" : "");
}

/** A digest of everything the executable is made of. */
async function sourceDigest(libraries: readonly string[], defines: Readonly<Record<string, string>>): Promise<string> {
	const hash = new Bun.CryptoHasher("sha256").update(JSON.stringify(defines)).update(Bun.version);
	const sources = [...new Bun.Glob("{src,examples}/**/*").scanSync(root), ...libraries];
	for (const file of [...sources.sort(), "build.ts", "package.json", "package-lock.json"]) {
		hash.update(`${file}\0`).update(await Bun.file(join(root, file)).arrayBuffer());
	}
	return hash.digest("hex");
}

/** One executable: the program and libraries of a folder; it reads no file when it starts. */
async function compile(executable: string, folder: string, kinds: readonly string[] = ["cpu"]): Promise<void> {
	const { version } = (await Bun.file(join(root, "package.json")).json()) as { version: string };
	const define = { MIMO_VERSION: JSON.stringify(version), MIMO_COMMIT: JSON.stringify(commit()) };
	const libraries = kinds.map((kind) => `${folder}/libmimo_${kind}.so`);
	const digest = await sourceDigest(libraries, define);
	const stamp = join(root, "build", `${executable.replaceAll("/", "-")}.digest`);
	const outfile = join(root, executable);
	// Renamed when whole; the name it is compiled under shows in its own arguments. Another may be compiled at the same time.
	const unfinished = join(root, "build/unfinished", executable);
	if (existsSync(outfile) && existsSync(stamp) && readFileSync(stamp, "utf8") === digest) return;
	const result = await Bun.build({
		entrypoints: ["main", ...workerModules].map((module) => join(root, `src/${module}.ts`)),
		target: "bun",
		format: "esm",
		minify: { syntax: true, whitespace: true, identifiers: false },
		bytecode: true,
		define,
		// The sources name the libraries of the default build; the import of a library that is not wanted gives null.
		plugins: [
			{
				name: "native libraries",
				setup: (build) => {
					build.onResolve({ filter: /\/build\/lib\/lib\w+\.so$/ }, ({ path }) => {
						const library = join(folder, basename(path));
						if (libraries.includes(library)) return { path: join(root, library) };
						return { path: basename(path), namespace: "not-inside" };
					});
					build.onLoad({ filter: /./, namespace: "not-inside" }, () => ({
						contents: "export default null;",
						loader: "js",
					}));
				},
			},
		],
		compile: {
			// This very Bun: a target by name may be fetched from the network.
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
	writeFileSync(stamp, digest);
}

const [kind = "cpu", ...more] = process.argv.slice(2);
if (kinds[kind] === undefined || more.length > 0) {
	fail(`it takes one of ${Object.keys(kinds).join(", ")}, not "${[kind, ...more].join(" ")}".`, 2);
}
await kinds[kind]();
