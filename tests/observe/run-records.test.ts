/** Records that cannot be written any more do not end a training: one warning each, whole entries, and the gap at the end. */
import { afterAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { MlflowRun } from "../../src/observe/mlflow.ts";
import { JsonLog } from "../../src/observe/run-log/writer.ts";
import { RunRecords } from "../../src/observe/run-records.ts";
import type { Observer } from "../../src/observe/step-report.ts";
import { TensorBoard } from "../../src/observe/tensorboard.ts";
import { removeTrace } from "../../src/observe/trace/tracer.ts";
import { UserError } from "../../src/system/errors.ts";
import { step } from "./step.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-records-"));
afterAll(() => rmSync(folder, { recursive: true }));

test("a removed file or folder gives a single warning, and a message about missing entries at the end", () => {
	const said: string[] = [];
	const records = new RunRecords((sentence) => said.push(sentence));
	const path = (name: string) => join(folder, name);
	const scalars = { interval: 1, timers: false, logInterval: 1, flopsPerStep: null, worldSize: 1 };
	const kept = [
		records.keep("log", new JsonLog(path("run.jsonl"))),
		records.keep("TensorBoard record", new TensorBoard({ ...scalars, folder: path("tb") })),
		records.keep(
			"MLflow record",
			new MlflowRun({ ...scalars, folder: path("mlruns"), experiment: "Default", runName: null }),
		),
	];
	for (const observer of kept) {
		observer.begin?.({ step: 0, training: "0".repeat(64), configuration: {}, arguments: [] });
		observer.step(step({ iteration: 1 }));
	}
	expect(said).toEqual([]);
	for (const name of ["run.jsonl", "tb", "mlruns"]) rmSync(path(name), { recursive: true });
	for (const iteration of [2, 3]) for (const observer of kept) observer.step(step({ iteration }));
	expect(said).toEqual([
		`The log ${path("run.jsonl")} cannot be written: it was removed. Training continues.`,
		expect.stringMatching(/^The event file .*tfevents.* cannot be written: it was removed\. Training continues\.$/),
		`mlflow-dir ${path("mlruns")} cannot be written: it does not exist. Training continues.`,
	]);
	for (const observer of kept) observer.close();
	expect(records.gaps()).toEqual([
		"The log is incomplete: 2 entries could not be written, the first after step 1.",
		"The TensorBoard record is incomplete: 2 entries could not be written, the first after step 1.",
		"The MLflow record is incomplete: 2 entries could not be written, the first after step 1.",
	]);
});

test("a start that cannot be written prevents the run, and a program error is not hidden", () => {
	const records = new RunRecords(() => {});
	const refuses = (error: Error): Observer => ({
		step: () => {
			throw error;
		},
		evaluation() {},
		note() {},
		event: () => {
			throw error;
		},
		close() {},
	});
	const refusal = new UserError("The disk is full.");
	const kept = records.keep("log", refuses(refusal));
	expect(() => kept.event?.({ kind: "start", step: 0, sentence: "" })).toThrow(refusal);
	expect(() => kept.event?.({ kind: "failure", step: 0, sentence: "" })).not.toThrow();
	const bug = new TypeError("undefined is not a function");
	expect(() => records.keep("other", refuses(bug)).step(step({ iteration: 1 }))).toThrow(bug);
	records.miss("list", null, "The disk is full.");
	expect(records.gaps()).toEqual([
		"The log is incomplete: 1 entry could not be written, the first after step 0.",
		"The list is incomplete: 1 entry could not be written.",
	]);
});

test("an entry that the disk takes in part is removed", () => {
	// The shell's limit on a file's size is a disk that is full for this file alone.
	const file = join(folder, "limited.jsonl");
	const program = `
		import { openSync, writeSync } from "node:fs";
		import { appendWhole } from ${JSON.stringify(join(import.meta.dir, "../../src/observe/record-files.ts"))};
		process.on("SIGXFSZ", () => {});
		const descriptor = openSync(${JSON.stringify(file)}, "a+");
		for (const length of [1000, 100, 10]) {
			try {
				appendWhole(descriptor, Buffer.alloc(length, String(length).length + 48));
			} catch (error) {
				console.log(error.message);
			}
		}`;
	const source = join(folder, "limited.ts");
	writeFileSync(source, program);
	// POSIX counts blocks of 512 bytes, bash of 1024.
	const { stdout, stderr } = Bun.spawnSync([
		"bash",
		"-c",
		'ulimit -f 1 && exec "$@"',
		"bash",
		process.execPath,
		source,
	]);
	expect([stdout.toString(), stderr.toString()]).toEqual(["the disk is full\n", ""]);
	expect(readFileSync(file, "latin1")).toBe("4".repeat(1000) + "2".repeat(10));
});

test("the parts of a trace that cannot be merged are removed, also if its folder is missing", () => {
	const traces = join(folder, "traces");
	mkdirSync(traces);
	for (const name of ["trace.json", "trace.json.rank-0", "trace.json.rank-1", "other"]) {
		writeFileSync(join(traces, name), "{");
	}
	removeTrace(join(traces, "trace.json"), 2);
	expect([...new Bun.Glob("*").scanSync(traces)]).toEqual(["other"]);
	removeTrace(join(folder, "gone/trace.json"), 2);
});
