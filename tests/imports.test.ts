/** The shape of the source tree: allowed imports, symbols that stay inside src/native, lengths of files. */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { absent } from "./absent.ts";

const root = join(import.meta.dir, "..");

/** Imports go to the same or a lower number. Folders of one number may import one way, never in a circle. */
const level: Readonly<Record<string, number>> = {
	"main.ts": 9,
	commands: 8,
	inference: 7,
	plan: 7,
	parity: 7,
	train: 6,
	data: 5,
	checkpoint: 5,
	guests: 5,
	models: 4,
	schedule: 4,
	optim: 4,
	decode: 5,
	parallel: 3,
	launch: 2,
	tensor: 2,
	native: 1,
	system: 0,
};
/** Every folder above `native` may import these; they import `native` and `system` alone. */
const everywhere = ["config", "observe"];

interface Import {
	readonly from: string;
	readonly to: string;
	readonly typesOnly: boolean;
}

/** Every import, export-from and import() of a source text. */
export function importsOf(text: string): { to: string; typesOnly: boolean }[] {
	const code = text.replace(/\/\*[\s\S]*?\*\//g, "").replace(/^\s*\/\/.*$/gm, "");
	const statements = code.matchAll(/\b(?:import|export)\s+(type\s)?(?:[\w*{}\s,$]+?\sfrom\s*)?"([^"]+)"/g);
	const calls = code.matchAll(/\bimport\(\s*"([^"]+)"/g);
	return [
		...Array.from(statements, ([, type, to]) => ({ to: to!, typesOnly: type !== undefined })),
		...Array.from(calls, ([, to]) => ({ to: to!, typesOnly: false })),
	];
}

const sources = [...new Bun.Glob("**/*.ts").scanSync(join(root, "src"))]
	.filter((file) => !file.endsWith(".d.ts"))
	.sort();
const imports: Import[] = sources.flatMap((from) =>
	importsOf(readFileSync(join(root, "src", from), "utf8")).map(({ to, typesOnly }) => ({
		from,
		to: to.startsWith(".") ? join(dirname(from), to) : to,
		typesOnly,
	})),
);
/** Imports of one source file by another; the built library and the files of npm packages are not of the tree. */
const inside = imports.filter(({ to }) => sources.includes(to));

function room(file: string): string {
	return file.split("/")[0]!;
}

/** A circle in a graph, as the names it passes; null when there is none. */
export function findCircle(edges: readonly (readonly [string, string])[]): string[] | null {
	const next = Map.groupBy(edges, ([from]) => from);
	const done = new Set<string>();
	const visit = (node: string, path: string[]): string[] | null => {
		if (path.includes(node)) return [...path.slice(path.indexOf(node)), node];
		if (done.has(node)) return null;
		for (const [, to] of next.get(node) ?? []) {
			const circle = visit(to, [...path, node]);
			if (circle) return circle;
		}
		done.add(node);
		return null;
	};
	for (const node of next.keys()) {
		const circle = visit(node, []);
		if (circle) return circle;
	}
	return null;
}

/** Why one room may not import another, or null. */
export function objection(from: string, to: string): string | null {
	if (from === to) return null;
	const isLow = (folder: string) => folder === "native" || folder === "system";
	if (everywhere.includes(from)) return isLow(to) ? null : `${from} imports native and system alone`;
	if (level[from] === undefined) return `${from} is no room of the design`;
	if (everywhere.includes(to)) return isLow(from) ? `${to} is above ${from}` : null;
	if (level[to] === undefined) return `${to} is no room of the design`;
	return level[to] <= level[from] ? null : `${to} is above ${from}`;
}

test("the rules object to what they should", () => {
	expect(objection("tensor", "train")).toBe("train is above tensor");
	expect(objection("train", "tensor")).toBeNull();
	expect(objection("config", "tensor")).toBe("config imports native and system alone");
	expect(objection("models", "config")).toBeNull();
	expect(objection("native", "config")).toBe("config is above native");
	expect(objection("native", "system")).toBeNull();
	expect(objection("system", "native")).toBe("native is above system");
	expect(objection("utilities", "native")).toBe("utilities is no room of the design");
	expect(
		findCircle([
			["a", "b"],
			["b", "c"],
			["c", "a"],
		]),
	).toEqual(["a", "b", "c", "a"]);
	expect(importsOf('import type { A } from "./a.ts";\nexport * from "./b.ts";\nawait import("./c.ts");')).toEqual([
		{ to: "./a.ts", typesOnly: true },
		{ to: "./b.ts", typesOnly: false },
		{ to: "./c.ts", typesOnly: false },
	]);
});

test("imports point one way", () => {
	const wrong = inside.flatMap(({ from, to }) => {
		const reason = objection(room(from), room(to));
		return reason === null ? [] : [`src/${from} imports src/${to}: ${reason}`];
	});
	expect(wrong).toEqual([]);
	expect(inside.length).toBeGreaterThan(10);
});

/** Folders with one door: others import their index.ts alone, but for modules that are loaded when they are asked for (import()). */
const doors = ["checkpoint", "parallel", "tensor"];

test("folders with a door are entered through it", () => {
	const around = sources.flatMap((from) => {
		const text = readFileSync(join(root, "src", from), "utf8");
		return importsOf(text.replaceAll(/\bimport\("[^"]+"\)/g, "")).flatMap(({ to }) => {
			const target = to.startsWith(".") ? join(dirname(from), to) : to;
			const door = doors.find((folder) => target.startsWith(`${folder}/`) && !from.startsWith(`${folder}/`));
			return door === undefined || target === `${door}/index.ts` ? [] : [`src/${from} imports src/${target}`];
		});
	});
	expect(around).toEqual([]);
	for (const folder of doors) {
		const lines = readFileSync(join(root, "src", folder, "index.ts"), "utf8").replace(/\/\*\*.*?\*\//s, "");
		expect(lines.replaceAll(/export (?:type )?\{[^}]*\} from "\.\/[\w./-]+";\s*/g, "").trim()).toBe("");
	}
});

test("neither rooms nor files import each other in a circle", () => {
	const rooms = inside.map(({ from, to }) => [room(from), room(to)] as const).filter(([from, to]) => from !== to);
	expect(findCircle(rooms)).toBeNull();
	expect(
		findCircle(inside.filter(({ typesOnly }) => !typesOnly).map(({ from, to }) => [from, to] as const)),
	).toBeNull();
});

test("bun:ffi stays inside src/native", () => {
	const foreign = imports.filter(({ from, to }) => to === "bun:ffi" && room(from) !== "native");
	expect(foreign.map(({ from }) => from)).toEqual([]);
});

/** Files that read others than through InputFile, which refuses pipes, devices and links out of a folder. */
const readThemselves = [
	// What the system and this program's own processes and folders hold.
	...["commands/machine.ts", "launch/join.ts", "launch/rank-process.ts", "launch/rendezvous/line-connection.ts"],
	...["checkpoint/native/writer-lock.ts", "data/energon/tools/bench.ts", "native/affinity.ts", "native/library.ts"],
	...[
		"checkpoint/remote/checkpoint-store.ts",
		"checkpoint/remote/plain-files.ts",
		"observe/trace/tracer.ts",
		"parity/verify/reference.ts",
		"parity/verify/verify.ts",
	],
	...["system/private-folder.ts", "data/energon/storage/block-cache.ts", "train/restart/kept-file.ts"],
	// After checks of their own.
	...["launch/secret.ts", "data/energon/storage/open.ts", "data/import/sources/table.ts"],
	// A configuration may be a pipe of the shell.
	"config/file.ts",
];

test("files of others are opened through one door", () => {
	const reading = /\b(?:readFileSync|createReadStream|readFile|mmap)\(|\bBun\.file\(/;
	const found = sources.filter((file) => {
		const code = readFileSync(join(root, "src", file), "utf8");
		return /from "node:fs|\bBun\.(?:file|mmap)\(/.test(code) && reading.test(code);
	});
	expect(found).toEqual(readThemselves.toSorted());
});

/** Files of the repository, or null where there is no repository (a source archive). */
function trackedFiles(): string[] | null {
	const git = Bun.which("git") ? Bun.spawnSync(["git", "ls-files", "-z"], { cwd: root }) : null;
	if (!git?.success) return absent("the list of tracked files", "git, in a clone");
	return git.stdout.toString().split("\0").filter(Boolean);
}

/** Files of others, kept as they are, and generated ones. */
const exempt = /^cuda\/third_party\/|^src\/native\/abi\.ts$/;

test("no source file is longer than 450 lines", () => {
	const long = (trackedFiles() ?? [])
		.filter((file) => /^(src|cuda|tests)\/.*\.(ts|h|cpp|cu|cuh|py)$|^build\.ts$/.test(file))
		.filter((file) => !exempt.test(file))
		.flatMap((file) => {
			const lines = readFileSync(join(root, file), "utf8").split("\n").length - 1;
			return lines > 450 ? [`${file}: ${lines} lines`] : [];
		});
	expect(long).toEqual([]);
});

test("no tracked file names a path of a machine or the host of a package registry", () => {
	// Put together here so that this file does not name them.
	const folders = ["work", "root", "farm", "home/[a-z]\\w*", "tmp/[a-z]\\w*"].map((folder) => `/${folder}`);
	const hosts = [
		["registry", "npmjs"],
		["registry", "yarnpkg"],
		["files", "pythonhosted"],
		["pypi", "org"],
	];
	const pattern = new RegExp(
		`(?<![\\w.$}])(${folders.join("|")})\\b|\\b(${hosts.map((host) => host.join("\\.")).join("|")})`,
	);
	const named = (trackedFiles() ?? [])
		.filter((file) => !/\.(safetensors|png|jpe?g|tar|idx|gz|zst|webp)$/.test(file))
		.flatMap((file) =>
			readFileSync(join(root, file), "utf8")
				.split("\n")
				.flatMap((line, i) => (pattern.test(line) ? [`${file}:${i + 1}: ${pattern.exec(line)![0]}`] : [])),
		);
	expect(named).toEqual([]);
});

test("tests mirror the source tree", () => {
	const rooms = [...Object.keys(level), ...everywhere, "e2e", "attack", "build", "bench", "cuda", "fuzz", "golden"];
	const strange = [...new Bun.Glob("**/*.test.ts").scanSync(import.meta.dir)].filter(
		(file) => file.includes("/") && !rooms.includes(room(file)),
	);
	expect(strange).toEqual([]);
});
