/** Offline runs of Weights & Biases, read by a decoder of the tests' own. */
import { expect, test } from "bun:test";
import { appendFileSync, existsSync, readdirSync, readFileSync, readlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { TransactionLog } from "../../src/observe/wandb/records.ts";
import { WandbRun } from "../../src/observe/wandb/run.ts";
import { testFolders, train, training } from "./tracked-training.ts";
import { decodeLog, type Fields, itemsOf, kindsOf, messagesOf, numberOf, textOf } from "./wandb-decoder.ts";

const folderOf = testFolders("wandb");

const scalars = { interval: 1, timers: false, logInterval: 1, flopsPerStep: null, worldSize: 1 };
const began = Date.parse("2026-01-31T09:00:00Z");

function open(folder: string, at: number, configuration: Record<string, unknown> = { lr: 3e-4, note: "<ü>" }) {
	let now = began;
	const about = { folder, entity: "team", project: "demo", name: "one" };
	const run = new WandbRun({ ...scalars, ...about }, () => (now += 250));
	run.begin({ step: at, training, configuration, arguments: [] });
	return run;
}

const event = (kind: "stop" | "end" | "failure") => ({ kind, step: null, sentence: `It is a ${kind}.` });

/** The folder and the records of the one run there is. */
function read(folder: string) {
	const [name] = readdirSync(join(folder, "wandb")).filter((one) => one.startsWith("offline-run-"));
	const home = join(folder, "wandb", name!);
	const file = join(home, readdirSync(home).find((one) => one.endsWith(".wandb"))!);
	const { records, torn } = decodeLog(readFileSync(file));
	const rows = records.flatMap((record) => messagesOf(record, 2)).map((row) => itemsOf(row, 1));
	return { name: name!, home, file, records, torn, rows };
}

const ofKind = (records: readonly Fields[], field: number) => records.flatMap((record) => messagesOf(record, field));

test("a run as the client leaves it: run, environment, files, rows, summary, exit", () => {
	const folder = folderOf();
	const run = open(folder, 0);
	train(run, 1, 1);
	// All values of a step are one row.
	run.evaluation({ iteration: 1, consumedSamples: 8, split: "validation", label: "", losses: { "lm loss": 2 } });
	train(run, 2, 2, () => Number.NaN);
	run.event(event("end"));
	run.close();
	const { name, home, records, rows, torn } = read(folder);
	expect(name).toMatch(/^offline-run-\d{8}_\d{6}-[a-z0-9]{8}$/);
	expect(readlinkSync(join(folder, "wandb/latest-run"))).toBe(name);
	expect(JSON.parse(readFileSync(join(home, "files/wandb-metadata.json"), "utf8")).program).toBe("mimo");
	expect(torn).toBe(0);
	expect(kindsOf(records)).toEqual([
		"1 header",
		"2 run",
		"3 environment",
		"4 files",
		"5 history",
		"6 summary",
		"7 history",
		"8 summary",
		"9 output",
		"10 exit",
	]);
	const [about] = ofKind(records, 17);
	expect([1, 2, 3, 8].map((field) => textOf(about!, field))).toEqual([name.slice(-8), "team", "demo", "one"]);
	expect(itemsOf(messagesOf(about!, 4)[0]!, 1)).toEqual({ lr: 3e-4, note: "<ü>" });
	const time = messagesOf(about!, 17)[0]!;
	expect([numberOf(time, 1), numberOf(time, 2)]).toEqual([began / 1000, 500_000_000]);
	expect(rows[0]).toMatchObject({
		"lm loss": 9,
		"lm loss validation": 2,
		"grad-norm": 5.6161,
		_step: 1,
		_runtime: 0.25,
	});
	expect(rows[1]).toMatchObject({ "lm loss": Number.NaN, _step: 2 });
	expect(ofKind(records, 2).map((row) => numberOf(messagesOf(row, 2)[0]!, 1))).toEqual([1, 2]);
	expect(itemsOf(ofKind(records, 3).at(-1)!, 1)._step).toBe(2);
	expect(textOf(ofKind(records, 13)[0]!, 3)).toBe("It is a end.\n");
	expect(numberOf(ofKind(records, 18)[0]!, 1)).toBe(0);
});

test("a resumed training appends: repeated steps once, without the exit record and an incomplete record, to be uploaded again", () => {
	const folder = folderOf();
	const first = open(folder, 0);
	train(first, 1, 5);
	first.event(event("stop"));
	first.close();
	const before = read(folder);
	expect(kindsOf(before.records).at(-1)).toBe("16 preempting");
	writeFileSync(`${before.file}.synced`, "");
	appendFileSync(before.file, "torn");
	const second = open(folder, 3, { lr: 1e-4 });
	train(second, 4, 6, (at) => 100 + at);
	second.event(event("failure"));
	second.close();
	const { records, rows, torn, name } = read(folder);
	expect([name, torn]).toEqual([before.name, 0]);
	expect(rows.map((row) => [row._step, row["lm loss"]])).toEqual([
		[1, 9],
		[2, 8],
		[3, 7],
		[4, 104],
		[5, 105],
		[6, 106],
	]);
	// One number after the other, over both processes.
	expect(records.map((record) => numberOf(record, 1))).toEqual(records.map((_, i) => i + 1));
	expect(itemsOf(ofKind(records, 5)[0]!, 1)).toEqual({ lr: 1e-4 });
	expect(ofKind(records, 18).map((exit) => numberOf(exit, 1))).toEqual([1]);
	expect(existsSync(`${before.file}.synced`)).toBe(false);
});

test("after a kill all rows except the latest are in the file", () => {
	const folder = folderOf();
	train(open(folder, 0), 1, 4);
	expect(read(folder).rows.map(({ _step }) => _step)).toEqual([1, 2, 3]);
});

test("records of every length at a block's end are read, and a truncation anywhere keeps the earlier records", () => {
	const folder = folderOf();
	const file = join(folder, "run-x.wandb");
	// Field 1 as bytes: lengths that leave 0 to 16 bytes in a block, and one over three blocks.
	const lengths = [...Array.from({ length: 17 }, (_, i) => 32768 - 7 - 7 - 20 + i), 3, 100_000, 0];
	const records = lengths.map((length, i) => {
		const bytes = Buffer.alloc(length + 6, i + 1);
		bytes[0] = (2 << 3) | 2;
		let [rest, at] = [length, 1];
		for (; at < 5; at++) {
			bytes[at] = at === 4 ? rest : (rest & 127) | 128;
			rest >>= 7;
		}
		return bytes.subarray(0, 5 + length);
	});
	{
		using log = TransactionLog.create(file);
		for (const record of records) log.append([record]);
	}
	const lengthsIn = (bytes: Buffer) =>
		decodeLog(bytes).records.map((record) => (record.get(2)![0] as Uint8Array).length);
	const whole = readFileSync(file);
	expect(lengthsIn(whole)).toEqual(lengths);
	for (const cut of [1, 6, 8, 12, 100, 40_000, 70_000, whole.length - 20]) {
		writeFileSync(file, whole.subarray(0, whole.length - cut));
		const kept = decodeLog(readFileSync(file)).records.length;
		{
			using log = TransactionLog.goOn(file, () => true);
			log.append([records[17]!]);
		}
		expect([cut, lengthsIn(readFileSync(file))]).toEqual([cut, [...lengths.slice(0, kept), 3]]);
	}
	// A damaged byte ends what is kept.
	const damaged = Buffer.from(whole);
	damaged[32768 * 3 + 100]! ^= 1;
	writeFileSync(file, damaged);
	TransactionLog.goOn(file, () => true)[Symbol.dispose]();
	expect(lengthsIn(readFileSync(file)).length).toBe(3);
});
