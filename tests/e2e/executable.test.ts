/** dist/mimo as a user meets it: it reads no files of the folder it starts in, and prints its version. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const root = join(import.meta.dir, "../..");
const executable = join(root, "dist/mimo");

// The library inside, whatever the tests themselves run against.
const { MIMO_CPU_LIBRARY: _, LD_PRELOAD: __, ...env } = process.env;

function mimo(args: readonly string[], cwd: string): { exitCode: number; output: string } {
	const child = Bun.spawnSync([executable, ...args], { cwd, env });
	return { exitCode: child.exitCode, output: `${child.stdout}${child.stderr}` };
}

describe("in a hostile folder", () => {
	let folder: string;
	beforeAll(() => {
		folder = mkdtempSync(join(tmpdir(), "mimo-hostile-"));
		const files = {
			".env": "MIMO_CPU_LIBRARY=/nonexistent/from-dotenv.so\nMIMO_DEBUG=4\n",
			".env.local": "MIMO_CPU_LIBRARY=/nonexistent/from-dotenv.so\n",
			"bunfig.toml": 'preload = ["./hostile.ts"]\n[define]\nMIMO_VERSION = "hostile"\n',
			"hostile.ts": 'console.log("hostile code ran"); process.exit(77);\n',
			"package.json": '{ "name": "hostile", "type": "commonjs", "imports": ',
			"tsconfig.json": '{ "compilerOptions": { "paths": { "*": ["./hostile.ts"] } } ',
			"node_modules/citty/package.json": '{ "name": "citty", "main": "index.js" }',
			"node_modules/citty/index.js": 'console.log("hostile code ran"); process.exit(77);\n',
		};
		for (const [name, text] of Object.entries(files)) {
			mkdirSync(join(folder, name, ".."), { recursive: true });
			writeFileSync(join(folder, name), text);
		}
	});
	afterAll(() => rmSync(folder, { recursive: true }));

	for (const args of [["--version"], ["--help"], ["train", "--help"]]) {
		test(`mimo ${args.join(" ")} says what it says elsewhere`, () => {
			const here = mimo(args, folder);
			expect(here.exitCode).toBe(0);
			expect(here).toEqual(mimo(args, root));
		});
	}
});

test("--version names version, commit, ABI and the libraries inside", () => {
	const { version } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as { version: string };
	const abi = /#define MIMO_ABI_VERSION (\d+)/.exec(
		readFileSync(join(root, "cuda/include/mimo/library.h"), "utf8"),
	)![1]!;
	const { exitCode, output } = mimo(["--version"], root);
	expect(exitCode).toBe(0);
	expect(output).toContain(version);
	expect(output).toMatch(/\b(commit )?([0-9a-f]{12}\+?|unknown)\b/);
	expect(output).toMatch(new RegExp(`ABI( version)? ${abi}\\b`));
	expect(output).toContain("OpenBLAS");
});

/** Inodes of the unpacked libraries that a process has mapped. */
function unpackedLibraries(pid: string): string[] {
	const maps = readFileSync(`/proc/${pid}/maps`, "utf8");
	return [...maps.matchAll(/^\S+ \S+ \S+ \S+ (\d+) +\/memfd:libmimo /gm)].map(([, inode]) => inode!);
}

test("the ranks of a run share one unpacked library", async () => {
	const run = ["--preset", "nemotron-vlm-tiny", "--encoder-dp", "1", "--llm-offset", "1", "--train-iters", "100000"];
	const child = Bun.spawn([executable, "train", "--device", "cpu", "--threads", "1", ...run], {
		env,
		stdout: "pipe",
		stderr: "inherit",
	});
	let output = "";
	for await (const part of child.stdout) {
		output += Buffer.from(part);
		if (output.includes("iteration        1/")) break;
	}
	const ranks = [...output.matchAll(/^rank \d: pid (\d+)/gm)].map(([, pid]) => pid!);
	const inodes = [String(child.pid), ...ranks].map(unpackedLibraries);
	child.kill();
	await child.exited;
	expect(ranks).toHaveLength(2);
	for (const own of inodes) expect(own.length).toBeGreaterThan(0);
	expect(new Set(inodes.flat()).size).toBe(1);
});
