/**
 * The Python package accepts what `mimo data prepare` writes, and gives the same orders and states. Runs where its command
 * is installed: named by MIMO_ENERGON, in build/energon (energon-install.sh puts it there) or on the PATH.
 */
import { afterAll, expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { absent } from "../absent.ts";
import { verifyGolden } from "./energon-reference/verify.ts";
import { captions, Scratch, tar } from "./fixtures.ts";

const installed = join(import.meta.dir, "../../build/energon/bin/energon");
const energon =
	process.env.MIMO_ENERGON ??
	(existsSync(installed) ? installed : Bun.which("energon")) ??
	absent("megatron-energon", "bash tests/data/energon-install.sh");
const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
/** Python's worker processes leave folders behind. */
const spawning = { stdout: "pipe", stderr: "pipe", env: { ...process.env, TMPDIR: scratch.path } } as const;

/** Runs the package's command; its output. Fails the test when it fails. */
function run(...args: string[]): string {
	const { exitCode, stdout, stderr } = Bun.spawnSync([energon!, ...args], spawning);
	const output = `${stdout}${stderr}`;
	expect([exitCode, exitCode === 0 ? "" : output]).toEqual([0, ""]);
	return output;
}

test.skipIf(energon === null)("energon info and energon lint accept a prepared folder", () => {
	const path = captions(scratch, "prepared", [7, 5, 9, 4], "2,1,1");
	const info = run("info", path);
	expect(info).toContain("25 samples");
	expect(info).toContain("CaptioningSample");
	expect(info).toMatch(/`train`.*12 samples in 2 shards/);
	expect(info).toMatch(/`val`.*9 samples in 1 shards/);
	expect(run("lint", path)).not.toContain("Traceback");
});

test.skipIf(energon === null)("energon lint refuses what is damaged afterwards", async () => {
	const path = captions(scratch, "damaged", [6, 6], "1,0,0");
	const shard = join(path, "damaged-001.tar");
	await Bun.write(shard, tar([["other.txt", "x"]]));
	const { exitCode } = Bun.spawnSync([energon!, "lint", path], spawning);
	expect(exitCode).not.toBe(0);
});

test.skipIf(energon === null)(
	"random settings give the same orders and states",
	async () => {
		const python = join(dirname(energon!), "python");
		const script = join(import.meta.dir, "energon-random/run.py");
		const folder = join(scratch.path, "random");
		const [count, seed] = [process.env.MIMO_TEST_FULL ? "60" : "6", process.env.MIMO_ENERGON_SEED ?? "1"];
		const { exitCode, stdout, stderr } = Bun.spawnSync([python, "-B", script, folder, count, seed], spawning);
		expect([exitCode, exitCode === 0 ? "" : stderr.toString()]).toEqual([0, ""]);
		expect(stdout.toString()).toStartWith(`${count} runs of megatron-energon`);
		const verdicts = [...verifyGolden(folder, new Images(await openLibrary("cpu")))];
		expect(verdicts.filter(({ difference }) => difference !== null)).toEqual([]);
		expect(verdicts.length).toBe(Number(count));
		// Join indexes made here are those that the package made.
		const indexes = [...new Bun.Glob("metadatasets/*.yaml.cache/*.bin").scanSync({ cwd: folder, absolute: true })];
		expect(indexes.length).toBeGreaterThan(0);
		const before = indexes.map((path) => readFileSync(path));
		for (const path of new Set(indexes.map(dirname))) prepare(path.slice(0, -".cache".length), defaultPrepareOptions);
		expect(indexes.filter((path, i) => !before[i]!.equals(readFileSync(path)))).toEqual([]);
	},
	1_800_000,
);

test("a folder is prepared again only with --force-overwrite", () => {
	const path = captions(scratch, "twice", [2]);
	const options = { ...defaultPrepareOptions, splitRatio: "1,0,0" };
	expect(() => prepare(path, options)).toThrow("--force-overwrite prepares it again");
	expect(prepare(path, { ...options, forceOverwrite: true }).samples).toBe(2);
});
