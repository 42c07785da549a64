/**
 * The Python package accepts what `mimo data prepare` and `mimo data import` write, and gives the same orders and states. Runs where its command
 * is installed: named by MIMO_ENERGON, in build/energon (energon-install.sh puts it there) or on the PATH.
 */
import { afterAll, expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { readDatasetConfig } from "../../src/data/energon/format/dataset-config.ts";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../src/data/energon/storage/open.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { absent } from "../absent.ts";
import { verifyGolden } from "./energon-reference/verify.ts";
import { captions, png, Scratch, tar } from "./fixtures.ts";
import { importing } from "./import/importing.ts";

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

let sets = 0;
/** Imports one record of every form, of which one is in another part. */
async function importedSet(): Promise<string> {
	scratch.file("import/a.png", png(5, 3, 1));
	scratch.file("import/b.png", png(4, 2, 2));
	const turns = (...texts: string[]) => texts.map((value, i) => ({ from: i % 2 === 0 ? "human" : "gpt", value }));
	const records = [
		{ image: "a.png", caption: "a caption" },
		{ image: ["a.png", "b.png"], conversations: turns("One <image> or <image>?", "Two.") },
		{ images: ["b.png", null, "a.png"], texts: [null, "between", null] },
		{ text: "words alone" },
	];
	scratch.file("import/train.jsonl", records.map((record) => JSON.stringify(record)).join("\n"));
	scratch.file("import/test.jsonl", JSON.stringify({ text: "a test" }));
	const set = join(scratch.path, `imported-${sets++}`);
	const { skipped } = await importing(join(scratch.path, "import"), set, { from: "json" });
	expect(skipped).toEqual([]);
	return set;
}

test.skipIf(energon === null)(
	"energon info and energon lint accept an imported folder, and give its texts and images",
	async () => {
		const path = await importedSet();
		const info = run("info", path);
		expect(info).toContain("5 samples");
		expect(info).toContain("InterleavedSample");
		expect(run("lint", path)).toContain("Skipping empty split part val");
		const script = `
from megatron.energon import WorkerConfig, get_loader, get_val_dataset
worker = WorkerConfig(rank=0, world_size=1, num_workers=0)
for part in ["train", "test"]:
    for batch in get_loader(get_val_dataset("${path}", split_part=part, worker_config=worker, batch_size=1)):
        [sequence] = batch.sequence if isinstance(batch.sequence[0], list) else [[one[0] for one in batch.sequence]]
        print("SAMPLE", [part if isinstance(part, str) else [*part.shape[-2:]] for part in sequence])
`;
		const { stdout, stderr } = Bun.spawnSync([join(dirname(energon!), "python"), "-c", script], spawning);
		const samples = stdout
			.toString()
			.split("\n")
			.filter((line) => line.startsWith("SAMPLE"));
		expect([samples, samples.length === 5 ? "" : stderr.toString()]).toEqual([
			[
				"SAMPLE [[3, 5], 'a caption']",
				"SAMPLE ['user: One ', [3, 5], ' or ', [2, 4], '?', 'assistant: Two.']",
				"SAMPLE [[2, 4], 'between', [3, 5]]",
				"SAMPLE ['words alone']",
				"SAMPLE ['a test']",
			],
			"",
		]);
	},
);

test("an imported folder has crude samples for mimo, whatever the loader does", async () => {
	const path = await importedSet();
	const config = (name: string | null) => readDatasetConfig(new LocalStorage(), path, name);
	expect(config(null)).toEqual(config("crude.yaml"));
	expect(config(null)).toMatchObject({
		sampleType: null,
		parts: null,
		subflavors: { mimo: { "image-decoding": "transformers" } },
	});
	const yaml = join(path, ".nv-meta/dataset.yaml");
	await Bun.write(yaml, readFileSync(yaml, "utf8").replaceAll("mimo_samples.py", "own.py"));
	expect(() => config(null)).toThrow(`${yaml} has a sample_loader in Python, which mimo cannot run`);
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
