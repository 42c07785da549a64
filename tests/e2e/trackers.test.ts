/** MLflow and Weights & Biases over stops and resumes of a real run, and as those packages themselves read them. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { readScalars } from "../../src/observe/tensorboard.ts";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { Scratch } from "../data/fixtures.ts";
import { decodeLog, itemsOf, kindsOf, messagesOf } from "../observe/wandb-decoder.ts";
import { pythonEnvironment, referencePython, runPython } from "../reference/python.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const common = [
	...["train", "--preset", "nemotron-tiny", ...deviceFlags.split(" "), "--lr-warmup-iters", "0", "--train-iters", "6"],
	...["--hidden-size", "64", "--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "4"],
	...["--save-interval", "2", "--eval-iters", "1", "--eval-interval", "3", "--log-json", "log.jsonl"],
	...[
		"--data-path",
		"text.txt",
		"--mlflow-dir",
		"mlruns",
		"--mlflow-experiment",
		"tiny",
		"--wandb-dir",
		"wb",
		"--wandb-project",
		"demo",
	],
];

function train(...more: string[]): string {
	const { exitCode, stdout, stderr } = mimo([...common, ...more], scratch.path);
	expect([exitCode, stderr.replace(/^ck \(load\) holds no checkpoint yet.*\n/, "")]).toEqual([0, ""]);
	return stdout;
}

/** Folders of runs. */
const mlflowRuns = () =>
	[...new Bun.Glob("mlruns/*/*/meta.yaml").scanSync(scratch.path)].map((file) => join(file, ".."));
const wandbFiles = () => [...new Bun.Glob("wb/wandb/offline-run-*/*.wandb").scanSync(scratch.path)];

const metric = (run: string, name: string): number[][] =>
	readFileSync(join(scratch.path, run, "metrics", name), "utf8")
		.trimEnd()
		.split("\n")
		.map((line) => line.split(" ").map(Number));

/** Of the run of `beforeAll`; a later test begins another. */
let firstWandbFile = "";
let firstLog = "";
let firstMlflowRun = "";

beforeAll(() => {
	scratch.file("text.txt", "All happy families are alike; each unhappy family is unhappy in its own way. ".repeat(200));
	train("--save", "ck", "--load", "ck", "--exit-interval", "5");
	// Goes on after step 4: step 5 is done again.
	expect(train("--save", "ck", "--load", "ck", "--ckpt-step", "4")).toContain(
		"Files: log log.jsonl, MLflow mlruns, Weights & Biases wb, checkpoints ck.",
	);
	firstWandbFile = wandbFiles()[0]!;
	firstLog = readFileSync(join(scratch.path, "log.jsonl"), "utf8");
	firstMlflowRun = mlflowRuns()[0]!;
}, 60_000);

test("a run that goes on in its folder of checkpoints has one record, with every step once", () => {
	const logged = readFileSync(join(scratch.path, "log.jsonl"), "utf8")
		.trimEnd()
		.split("\n")
		.map((line) => JSON.parse(line));
	const losses = new Map(logged.flatMap((one) => (one.tokens ? [[one.iteration, one["lm loss"]]] : [])));
	const expected = [1, 2, 3, 4, 5, 6].map((step) => [step, losses.get(step)]);
	const [run] = mlflowRuns();
	expect(metric(run!, "lm loss").map(([, loss, step]) => [step, loss])).toEqual(expected);
	expect(metric(run!, "lm loss validation").map(([, , step]) => step)).toEqual([3, 6]);
	const { records, torn } = decodeLog(readFileSync(join(scratch.path, wandbFiles()[0]!)));
	const rows = records.flatMap((record) => messagesOf(record, 2)).map((row) => itemsOf(row, 1));
	expect(torn).toBe(0);
	expect(rows.map((row) => [row._step, row["lm loss"]])).toEqual(expected);
	expect(kindsOf(records).at(-1)).toEndWith(" exit");
	expect([mlflowRuns().length, wandbFiles().length]).toEqual([1, 1]);
});

test("the same checkpoint taken elsewhere is another run, and leaves the first as it is", () => {
	const [run] = mlflowRuns();
	const before = readdirSync(join(scratch.path, run!, "metrics")).length;
	train("--save", "elsewhere", "--load", "ck", "--ckpt-step", "4");
	expect([mlflowRuns().length, wandbFiles().length]).toEqual([2, 2]);
	expect(readdirSync(join(scratch.path, run!, "metrics"))).toHaveLength(before);
	expect(metric(run!, "lm loss")).toHaveLength(6);
	expect(metric(mlflowRuns().find((one) => one !== run)!, "lm loss").map(([, , step]) => step)).toEqual([5, 6]);
}, 60_000);

test("a log is recorded afterwards as the training has recorded it, also line by line from a pipe that ends early", () => {
	const live = firstMlflowRun;
	const values = (run: string, name: string) => metric(run, name).map(([, value, step]) => [value, step]);
	const into = ["--mlflow-dir", "again", "--wandb-save-dir", "wb2", "--tensorboard-dir", "tb"];
	scratch.file("first.jsonl", firstLog);
	const { exitCode, stdout, stderr } = mimo(
		["report", "first.jsonl", "--to", "mlflow,wandb,tensorboard", ...into],
		scratch.path,
	);
	expect([exitCode, stderr, stdout]).toEqual([0, "", expect.stringMatching(/^first.jsonl: \d+ lines recorded\.\n$/)]);
	const [after] = [...new Bun.Glob("again/*/*/meta.yaml").scanSync(scratch.path)].map((file) => join(file, ".."));
	const namesOf = (run: string) => [...new Bun.Glob("**").scanSync(join(scratch.path, run, "metrics"))].sort();
	const names = namesOf(live);
	expect(namesOf(after!)).toEqual(names);
	for (const name of names.filter((one) => !/-time$/.test(one))) {
		expect([name, values(after!, name)]).toEqual([name, values(live, name)]);
	}
	for (const name of readdirSync(join(scratch.path, live, "params"))) {
		const text = (run: string) => readFileSync(join(scratch.path, run, "params", name), "utf8");
		expect([name, text(after!)]).toEqual([name, text(live)]);
	}
	const rows = ([file]: string[]) =>
		decodeLog(readFileSync(join(scratch.path, file!))).records.flatMap((record) =>
			messagesOf(record, 2).map((row) => itemsOf(row, 1)["lm loss"]),
		);
	expect(rows([...new Bun.Glob("wb2/wandb/offline-run-*/*.wandb").scanSync(scratch.path)])).toEqual(
		rows([firstWandbFile]),
	);
	expect(readScalars(join(scratch.path, "tb")).get("lm loss")?.size).toBe(6);
	// As of a training that is killed after step 5.
	const lines = firstLog.split("\n");
	const part = lines.slice(0, lines.findIndex((line) => line.startsWith('{"iteration":5,')) + 1).join("\n");
	const piped = Bun.spawnSync([executable, "report", "-", "--to", "mlflow", "--mlflow-dir", "piped"], {
		cwd: scratch.path,
		stdin: Buffer.from(`${part}\n{"iterat`),
	});
	expect([piped.exitCode, piped.stderr.toString()]).toEqual([0, ""]);
	const [cut] = [...new Bun.Glob("piped/*/*/meta.yaml").scanSync(scratch.path)].map((file) => join(file, ".."));
	expect(values(cut!, "lm loss")).toEqual(values(live, "lm loss").slice(0, 5));
	expect(readFileSync(join(scratch.path, cut!, "meta.yaml"), "utf8")).toContain("status: 1\n");
}, 60_000);

test("records that cannot be begun prevent the training, and names that lead out of a store are refused", () => {
	const flags = ["--train-iters", "1", "--lr-warmup-iters", "0", "--data-path", "text.txt", "--mlflow-dir", "text.txt"];
	const refused = mimo(["train", "--preset", "nemotron-tiny", ...deviceFlags.split(" "), ...flags], scratch.path);
	expect([refused.exitCode, refused.stderr]).toEqual([
		1,
		"mimo: mlflow-dir text.txt cannot be written: a file of that name is in the way.\n",
	]);
	const flagsOfTwo = [...flags.slice(0, -2), "--wandb-save-dir", "text.txt", "--llm-dp", "2"];
	const two = mimo(["train", "--preset", "nemotron-tiny", ...deviceFlags.split(" "), ...flagsOfTwo], scratch.path);
	expect([two.exitCode, two.stderr.split("\n")[0]]).toEqual([
		1,
		expect.stringMatching(/rank 1 .* wandb-save-dir text\.txt cannot be written: a part of its path is not a folder/),
	]);
	scratch.file("evil.jsonl", `${firstLog.split("\n")[0]}\n{"iteration":1,"../../x":1}\n`);
	const evil = mimo(["report", "evil.jsonl", "--to", "mlflow", "--mlflow-dir", "evil"], scratch.path);
	expect([evil.exitCode, evil.stderr]).toEqual([
		1,
		'mimo: evil.jsonl, line 2 is not a log\'s: "../../x" is no name of a value.\n',
	]);
	const unknown = mimo(["report", "evil.jsonl", "--to", "comet"], scratch.path);
	expect([unknown.exitCode, unknown.stderr]).toEqual([
		2,
		"mimo: --to comet: trackers are mlflow, wandb, tensorboard.\n",
	]);
}, 60_000);

test("keys that need another one are refused together", () => {
	const refused = (...flags: string[]) => {
		const { exitCode, stderr } = mimo(["train", "--preset", "nemotron-tiny", "--train-iters", "100", ...flags]);
		return [exitCode, stderr];
	};
	expect(refused("--wandb-project", "p")).toEqual([
		2,
		'mimo: --wandb-project: the value is "p"; it needs wandb-save-dir or save.\n',
	]);
	expect(refused("--mlflow-run-name", "a", "--wandb-exp-name", "b")).toEqual([
		2,
		[
			"mimo: 2 mistakes in the configuration:",
			'  --mlflow-run-name: the value is "a"; it needs mlflow-dir.',
			'  --wandb-exp-name: the value is "b"; it needs wandb-project or wandb-save-dir.\n',
		].join("\n"),
	]);
});

const mlflow = referencePython("mlflow");
test.skipIf(mlflow === null)(
	"MLflow's own client opens the store",
	async () => {
		const script = `
import json
from pathlib import Path
from mlflow.tracking import MlflowClient
client = MlflowClient(Path("mlruns").resolve().as_uri())
experiment = client.get_experiment_by_name("tiny")
run = client.search_runs([experiment.experiment_id], "params.\`save\` = 'ck'")[0]
history = client.get_metric_history(run.info.run_id, "lm loss")
print(json.dumps([run.info.status, run.info.run_name, run.data.params["train-iters"], [m.step for m in history], run.data.metrics["lm loss"] == history[-1].value]))
`;
		expect(JSON.parse(await runPython(mlflow!, ["-c", script], { cwd: scratch.path }))).toEqual([
			"FINISHED",
			"ck",
			"6",
			[1, 2, 3, 4, 5, 6],
			true,
		]);
	},
	120_000,
);

const wandb = referencePython("wandb");
test.skipIf(wandb === null)(
	"W&B's own messages parse every record, and wandb sync would upload the runs",
	async () => {
		// The packages' generated classes; what they do not know they keep aside.
		const script = `
import json
from google.protobuf.unknown_fields import UnknownFieldSet
from wandb.proto.wandb_internal_pb2 import Record
steps, unknown = [], 0
for line in json.load(open("records.json")):
    record = Record()
    record.ParseFromString(bytes(line))
    unknown += len(UnknownFieldSet(record)) + sum(len(UnknownFieldSet(value)) for _, value in record.ListFields() if hasattr(value, "ListFields"))
    if record.WhichOneof("record_type") == "history":
        steps.append([record.history.step.num, [json.loads(item.value_json) for item in record.history.item if list(item.nested_key) == ["_step"]][0]])
print(json.dumps([steps, unknown]))
`;
		const file = readFileSync(join(scratch.path, firstWandbFile));
		scratch.file("records.json", JSON.stringify(decodeLog(file).raw.map((bytes) => [...bytes])));
		expect(JSON.parse(await runPython(wandb!, ["-c", script], { cwd: scratch.path }))).toEqual([
			[1, 2, 3, 4, 5, 6].map((step) => [step, step]),
			0,
		]);
		const sync = Bun.spawnSync([wandb!, "-m", "wandb", "sync", "--dry-run", "wb/wandb"], {
			cwd: scratch.path,
			env: pythonEnvironment,
		});
		expect(sync.stderr.toString() + sync.stdout.toString()).toContain("Would sync");
	},
	120_000,
);
