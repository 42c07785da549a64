import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { JsonLog } from "../../src/observe/run-log/writer.ts";
import { UserError } from "../../src/system/errors.ts";
import { step } from "./step.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-json-log-"));
afterAll(() => rmSync(folder, { recursive: true }));

function records(file: string): Record<string, unknown>[] {
	return readFileSync(file, "utf8")
		.trimEnd()
		.split("\n")
		.map((line) => JSON.parse(line));
}

test("one object a step, numbers at full precision", () => {
	const file = join(folder, "log.json");
	const log = new JsonLog(file, () => new Date(0));
	const loss = 12.187350273132324;
	log.step(step({ iteration: 1, losses: { "lm loss": loss, z_loss: 0.1 + 0.2 }, numZeros: 3, seconds: 0.25 }));
	log.evaluation({ iteration: 1, split: "validation", label: "iteration 1", losses: { "lm loss": 2 } });
	log.close();
	expect(records(file)).toEqual([
		{
			iteration: 1,
			consumed_samples: 8,
			skipped_samples: 0,
			global_batch_size: 8,
			tokens: 2048,
			learning_rate: 2e-4,
			next_learning_rate: 1.951546e-4,
			"lm loss": loss,
			z_loss: 0.30000000000000004,
			loss_scale: 1,
			grad_norm: 5.6161,
			num_zeros: 3,
			skipped: false,
			time: "1970-01-01T00:00:00.000Z",
			elapsed_ms: 250,
			tokens_per_second: 8192,
		},
		{ iteration: 1, split: "validation", "lm loss": 2, time: "1970-01-01T00:00:00.000Z" },
	]);
});

test("fields of every record are in steps, evaluations and events", () => {
	const file = join(folder, "always.json");
	const log = new JsonLog(file, () => new Date(0), undefined, { caution: "a benchmark" });
	log.event({ kind: "start", step: 0, sentence: "A new training." });
	log.step(step({ iteration: 1 }));
	log.evaluation({ iteration: 1, split: "validation", label: "iteration 1", losses: { "lm loss": 2 } });
	log.event({ kind: "end", step: 1, sentence: "Trained 1 step." });
	log.close();
	expect(records(file).map(({ caution }) => caution)).toEqual([
		"a benchmark",
		"a benchmark",
		"a benchmark",
		"a benchmark",
	]);
});

test("a second run appends, also after a run that died in the middle of a line", () => {
	const file = join(folder, "twice.json");
	writeFileSync(file, '{"iteration":1}\n{"iteration":2,"lm lo');
	const log = new JsonLog(file);
	log.step(step({ iteration: 2 }));
	log.close();
	const lines = readFileSync(file, "utf8").split("\n");
	expect(lines.slice(0, 2)).toEqual(['{"iteration":1}', '{"iteration":2,"lm lo']);
	expect(JSON.parse(lines[2]!).iteration).toBe(2);
	expect(lines[3]).toBe("");
});

test("a new run renames the log of an earlier run, a resumed run appends to its log", () => {
	const file = join(folder, "run.jsonl");
	const said: string[] = [];
	const run = (at: number) => {
		const log = new JsonLog(
			file,
			() => new Date(0),
			(sentence) => said.push(sentence),
		);
		log.event({ kind: "start", step: at, sentence: "" });
		log.step(step({ iteration: at + 1 }));
		log.close();
	};
	run(0);
	run(1);
	expect(records(file).map((record) => record.event ?? record.iteration)).toEqual(["start", 1, "start", 2]);
	const [first, , second] = records(file);
	expect([first!.step, second!.step]).toEqual([0, 1]);
	expect(first!.run).toMatch(/^[0-9a-f-]{36}$/);
	expect(second!.run).toBe(first!.run);
	expect(said).toEqual([]);
	run(0);
	run(0);
	expect(records(file).map((record) => record.event ?? record.iteration)).toEqual(["start", 1]);
	expect(records(file)[0]!.run).not.toBe(first!.run);
	expect(records(join(folder, "run.1.jsonl"))[0]!.run).toBe(first!.run);
	expect(records(join(folder, "run.2.jsonl"))).toHaveLength(2);
	expect(said).toEqual(
		[1, 2].map((n) => `${file} was the log of an earlier run, which was renamed to ${folder}/run.${n}.jsonl.`),
	);
});

test("NaN and infinities are strings", () => {
	const file = join(folder, "nan.json");
	const log = new JsonLog(file);
	log.step(step({ iteration: 1, losses: { "lm loss": Number.NaN }, gradNorm: Number.POSITIVE_INFINITY }));
	log.close();
	expect(records(file)[0]).toMatchObject({ "lm loss": "NaN", grad_norm: "Infinity" });
});

test("a file that cannot be opened or written is named", () => {
	writeFileSync(join(folder, "file"), "");
	expect(() => new JsonLog(join(folder, "file/log.json"))).toThrow(UserError);
	const full = new JsonLog("/dev/full");
	expect(() => full.step(step({ iteration: 1 }))).toThrow(/The log \/dev\/full cannot be written/);
	full.close();
	expect(() => new JsonLog(join(folder, "file/log.json"))).toThrow(/The log .*file\/log\.json cannot be written/);
});
