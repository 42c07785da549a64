/** Runs in MLflow's file store: its folders and files, line by line. */
import { expect, test } from "bun:test";
import { appendFileSync, existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parse } from "yaml";
import { MlflowRun } from "../../src/observe/mlflow.ts";
import { testFolders, train, training } from "./tracked-training.ts";

const newFolder = testFolders("mlflow");
const folderOf = () => join(newFolder(), "mlruns");

const scalars = { interval: 1, timers: true, logInterval: 2, flopsPerStep: null, worldSize: 1 };
const began = 1_800_000_000_000;

function open(folder: string, at: number, experiment = "digits", save: string | null = "runs/digits") {
	let now = began;
	const run = new MlflowRun({ ...scalars, folder, experiment, runName: null }, () => now++);
	run.begin({
		step: at,
		training,
		configuration: { lr: 3e-4, split: [969, 30, 1], ...(save === null ? {} : { save }) },
		arguments: [],
	});
	return run;
}

const event = (kind: "stop" | "end" | "failure") => ({ kind, step: null, sentence: "" });
const yamlOf = (file: string) => parse(readFileSync(file, "utf8"));

/** The one run of the experiment of that name. */
function read(folder: string, experiment = "digits") {
	const id = readdirSync(folder).find((one) => yamlOf(join(folder, one, "meta.yaml")).name === experiment)!;
	const runs = readdirSync(join(folder, id)).filter((one) => one !== "meta.yaml");
	expect(runs).toHaveLength(1);
	const home = join(folder, id, runs[0]!);
	const metric = (name: string) => {
		const lines = readFileSync(join(home, "metrics", name), "utf8").split("\n");
		expect(lines.pop()).toBe("");
		return lines.map((line) => line.split(" ").map(Number));
	};
	return { id, home, meta: yamlOf(join(home, "meta.yaml")), metric };
}

test("experiment, run, parameters, tags and metrics, while the run goes on and at its end", () => {
	const folder = folderOf();
	const run = open(folder, 0);
	train(run, 1, 2);
	const { id, home, meta, metric } = read(folder);
	expect(yamlOf(join(folder, "0", "meta.yaml"))).toMatchObject({ experiment_id: "0", name: "Default" });
	expect(yamlOf(join(folder, id, "meta.yaml"))).toMatchObject({
		experiment_id: id,
		name: "digits",
		lifecycle_stage: "active",
		artifact_location: `file://${folder}/${id}`,
	});
	expect(id).toMatch(/^\d{18}$/);
	expect(meta).toMatchObject({
		experiment_id: id,
		run_id: training.slice(0, 32),
		run_name: "digits",
		status: 1,
		end_time: null,
		lifecycle_stage: "active",
		source_type: 4,
		artifact_uri: `file://${home}/artifacts`,
	});
	expect(metric("lm loss").map(([time, ...rest]) => [time! >= began, ...rest])).toEqual([
		[true, 9, 1],
		[true, 8, 2],
	]);
	expect(metric("iteration-time").map(([, ...rest]) => rest)).toEqual([[0.5, 2]]);
	const texts = ["params/lr", "params/split", "tags/mlflow.runName", "tags/mlflow.source.type"];
	expect(texts.map((file) => readFileSync(join(home, file), "utf8"))).toEqual([
		"0.0003",
		"969,30,1",
		"digits",
		"LOCAL",
	]);
	run.evaluation({ iteration: 2, split: "validation", label: "", losses: { "lm loss": 2, "odd%name": 1 } });
	expect(metric("lm loss validation").map(([, ...rest]) => rest)).toEqual([[2, 2]]);
	// A character that the store refuses.
	expect(metric("odd_name validation")).toHaveLength(1);
	run.event(event("end"));
	expect(read(folder).meta).toMatchObject({ status: 3, end_time: expect.any(Number) });
});

test("a resumed training appends: repeated steps are there once, an incomplete line is removed", () => {
	const folder = folderOf();
	const first = open(folder, 0);
	train(first, 1, 5);
	first.evaluation({ iteration: 5, split: "validation", label: "", losses: { "lm loss": 2 } });
	first.event(event("stop"));
	const before = read(folder);
	expect(before.meta.status).toBe(5);
	appendFileSync(join(before.home, "metrics/lm loss"), "18000000");
	const second = open(folder, 3);
	expect(existsSync(join(before.home, "metrics/lm loss validation"))).toBe(false);
	train(second, 4, 6, (at) => 100 + at);
	second.event(event("failure"));
	const { meta, metric } = read(folder);
	expect(meta).toMatchObject({ run_id: before.meta.run_id, start_time: before.meta.start_time, status: 4 });
	expect(metric("lm loss").map(([, value, at]) => [at, value])).toEqual([
		[1, 9],
		[2, 8],
		[3, 7],
		[4, 104],
		[5, 105],
		[6, 106],
	]);
});

test("an existing experiment is used, Default is number 0, and a folder that cannot be created is named", () => {
	const folder = folderOf();
	open(folder, 0, "Default", null);
	expect(read(folder, "Default")).toMatchObject({ id: "0", meta: { run_name: training.slice(0, 8) } });
	expect(readdirSync(folder)).toEqual(["0"]);
	open(folder, 0, "other");
	open(folder, 0, "other");
	expect(readdirSync(folder)).toHaveLength(2);
	writeFileSync(`${folder}-file`, "");
	expect(() => open(`${folder}-file`, 0)).toThrow(
		`mlflow-dir ${folder}-file cannot be written: a file of that name is in the way`,
	);
});

test("damaged experiments of others are named and left out; the run's own is refused", () => {
	const folder = folderOf();
	open(folder, 0).event(event("end"));
	const { id } = read(folder);
	const planted: Readonly<Record<string, string>> = {
		5: "[unclosed",
		6: "plain text",
		7: `a: &a [x, x, x, x, x, x, x, x, x]\n${Array.from({ length: 12 }, (_, i) => `b${i}: &b${i} [${Array(9).fill(i === 0 ? "*a" : `*b${i - 1}`)}]\n`).join("")}`,
	};
	for (const [name, text] of Object.entries(planted)) {
		mkdirSync(join(folder, name));
		writeFileSync(join(folder, name, "meta.yaml"), text);
	}
	mkdirSync(join(folder, "8"));
	Bun.spawnSync(["mkfifo", join(folder, "8", "meta.yaml")]);
	const notes: string[] = [];
	const again = new MlflowRun({ ...scalars, folder, experiment: "another", runName: null }, undefined, (text) =>
		notes.push(text),
	);
	again.begin({ step: 0, training, configuration: {}, arguments: [] });
	const left = (name: string, why: string) =>
		expect.stringMatching(new RegExp(`^An experiment in mlflow-dir is left out: .*/${name}/meta.yaml.*${why}.*\\.$`));
	expect(notes.sort()).toEqual([
		left("5", "is not YAML: Flow sequence must end with a \\]"),
		left("6", "describes neither an experiment nor a run"),
		left("7", "is not YAML: Excessive alias count"),
		left("8", "it is not a regular file"),
	]);
	writeFileSync(join(folder, id, "meta.yaml"), "[unclosed");
	expect(() => open(folder, 2)).toThrow(`${id}/meta.yaml is not YAML`);
});
