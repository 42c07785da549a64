/**
 * The Python package accepts what `mimo data prepare` and `mimo data import` write, and gives the same orders and states. Runs where its command
 * is installed: named by MIMO_ENERGON, in build/energon (energon-install.sh puts it there) or on the PATH.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
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

/** The package's command line, several times in one process: to start it takes longer than most commands. */
const commandLine = `
import contextlib, io, json, sys, traceback
from megatron.energon.cli.main import main
ended = []
for command in json.loads(sys.argv[1]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(command)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.print_exc() or 1
    ended.append([code, output.getvalue()])
print("ENDED" + json.dumps(ended))
`;
const paths = { prepared: "", imported: "", damaged: "" };
const ended = new Map<string, readonly [exitCode: number, output: string]>();

beforeAll(async () => {
	if (energon === null) return;
	paths.prepared = captions(scratch, "prepared", [7, 5, 9, 4], "2,1,1");
	paths.imported = await importedSet();
	paths.damaged = captions(scratch, "damaged", [6, 6], "1,0,0");
	await Bun.write(join(paths.damaged, "damaged-001.tar"), tar([["other.txt", "x"]]));
	const accepted = [paths.prepared, paths.imported].flatMap((path) => [
		["info", path],
		["lint", path],
	]);
	const commands = [...accepted, ["lint", paths.damaged]];
	const python = [join(dirname(energon), "python"), "-c", commandLine, JSON.stringify(commands)];
	const { stdout, stderr } = Bun.spawnSync(python, spawning);
	const line = /^ENDED(.*)$/m.exec(stdout.toString());
	expect([line === null, line === null ? stderr.toString() : ""]).toEqual([false, ""]);
	for (const [i, outcome] of JSON.parse(line![1]!).entries()) ended.set(commands[i]!.join(" "), outcome);
}, 120_000);

/** Output of the package's command. Fails the test when it failed. */
function run(...command: string[]): string {
	const [exitCode, output] = ended.get(command.join(" "))!;
	expect([exitCode, exitCode === 0 ? "" : output]).toEqual([0, ""]);
	return output;
}

test.skipIf(energon === null)("energon info and energon lint accept a prepared folder", () => {
	const path = paths.prepared;
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
	() => {
		const path = paths.imported;
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

test.skipIf(energon === null)("energon lint refuses what is damaged afterwards", () => {
	const [exitCode, output] = ended.get(`lint ${paths.damaged}`)!;
	expect([exitCode !== 0, output]).toEqual([true, expect.stringContaining("damaged-001.tar")]);
});

test.skipIf(energon === null)(
	"random settings give the same orders and states",
	async () => {
		const python = join(dirname(energon!), "python");
		const script = join(import.meta.dir, "energon-random/run.py");
		const folder = join(scratch.path, "random");
		const [count, seed] = [process.env.MIMO_TEST_FULL ? "60" : "4", process.env.MIMO_ENERGON_SEED ?? "1"];
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
