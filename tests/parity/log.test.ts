/** A run's log against golden values and TensorBoard events. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { maskedCrc } from "../../src/observe/tensorboard.ts";
import { firstFailure } from "../../src/parity/comparison.ts";
import { logParity } from "../../src/parity/log.ts";

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-log-parity-"));
	const lines = [1, 2, 3].map((iteration) => JSON.stringify({ iteration, "lm loss": 4 - iteration, grad_norm: 0.5 }));
	writeFileSync(join(folder, "log.jsonl"), `${lines.join("\n")}\n{"iteration":3,"split":"validation","lm loss":9}\n`);
});
afterAll(() => rmSync(folder, { recursive: true }));

function goldenValues(values: Record<string, number | string>): string {
	const path = join(folder, "golden_values.json");
	const metric = { start_step: 1, end_step: 3, step_interval: 1, values };
	writeFileSync(path, JSON.stringify({ "lm loss": metric, "iteration-time": { ...metric, values: { "1": 99 } } }));
	return path;
}

const log = () => join(folder, "log.jsonl");

const loose = { tolerance: 0.05, test: null };

test("equal values agree, times are not compared", () => {
	const report = logParity(goldenValues({ "1": 3.01, "2": 2, "3": 1 }), log(), loose);
	expect(report.checks).toHaveLength(3);
	expect(firstFailure(report)).toBeUndefined();
});

test("the first step that is off is named", () => {
	const report = logParity(goldenValues({ "1": 3, "2": 2.3, "3": 1.5 }), log(), loose);
	expect(firstFailure(report)?.name).toBe("step 2 lm loss");
});

test("nothing in common is an error", () => {
	expect(() => logParity(goldenValues({ "7": 3 }), log(), loose)).toThrow("no metric and step in common");
});

/** One event file record holding a scalar, written by hand from the format's description. */
function record(step: number, tag: string, value: number): Buffer {
	const name = Buffer.from(tag);
	const float = Buffer.alloc(4);
	float.writeFloatLE(value);
	const entry = Buffer.concat([Buffer.from([0x0a, name.length]), name, Buffer.from([0x15]), float]);
	const summary = Buffer.concat([Buffer.from([0x0a, entry.length]), entry]);
	const event = Buffer.concat([Buffer.from([0x10, step, 0x2a, summary.length]), summary]);
	const length = Buffer.alloc(8);
	length.writeBigUInt64LE(BigInt(event.length));
	const crc = (bytes: Buffer) => {
		const out = Buffer.alloc(4);
		out.writeUInt32LE(maskedCrc(bytes));
		return out;
	};
	return Buffer.concat([length, crc(length), event, crc(event)]);
}

test("TensorBoard events are read, a torn last record is left out, a damaged one is named", () => {
	const events = Buffer.concat([record(1, "lm loss", 3), record(2, "lm loss", 2.5), record(3, "lm loss", 1)]);
	const path = join(folder, "events.out.tfevents.1");
	writeFileSync(path, events.subarray(0, events.length - 3));
	const report = logParity(folder, log(), loose);
	expect(report.checks.map(({ name }) => name)).toEqual(["step 1 lm loss", "step 2 lm loss"]);
	expect(firstFailure(report)?.name).toBe("step 2 lm loss");
	events[20]! ^= 1;
	writeFileSync(path, events);
	expect(() => logParity(folder, log(), loose)).toThrow("does not match its checksum");
});

test("CRC-32C of the published check string", () => {
	// crc32c("123456789") = e3069283, masked by TFRecord's rotation and offset.
	const crc = 0xe3069283;
	expect(maskedCrc(Buffer.from("123456789"))).toBe((((crc >>> 15) | (crc << 17)) + 0xa282ead8) >>> 0);
});

/** Golden values of `metrics`: a number for each step. */
function values(name: string, metrics: Readonly<Record<string, readonly number[]>>): string {
	const path = join(folder, name);
	const series = Object.entries(metrics).map(([metric, numbers]) => {
		const steps = Object.fromEntries(numbers.map((value, step) => [step + 1, value]));
		return [metric, { start_step: 1, end_step: numbers.length, step_interval: 1, values: steps }];
	});
	writeFileSync(path, JSON.stringify(Object.fromEntries(series)));
	return path;
}

test("a functional test's metrics are compared with its tolerances, of which a step in a hundred may be off", () => {
	const own = join(folder, "long.jsonl");
	const lines = Array.from({ length: 20 }, (_, at) => ({ iteration: at + 1, "lm loss": 3, num_zeros: 100 }));
	writeFileSync(own, `${lines.map((line) => JSON.stringify(line)).join("\n")}\n`);
	const numbers = (value: number, ...others: readonly number[]) =>
		[...others, ...new Array<number>(20).fill(value)].slice(0, 20);
	const config = (text: string) => {
		const path = join(folder, "model_config.yaml");
		writeFileSync(path, `MODEL_ARGS:\n  --num-layers: 4\n${text}`);
		return { tolerance: 1e-9, test: path };
	};
	const holds = (golden: string, text: string) => firstFailure(logParity(golden, own, config(text))) === undefined;
	const near = values("near.json", { "lm loss": numbers(3.1, 9), "num-zeros": numbers(118, 500) });
	expect(holds(near, "")).toBe(true);
	expect(holds(values("two.json", { "lm loss": numbers(3, 9, 9), "num-zeros": numbers(100) }), "")).toBe(false);
	expect(holds(values("zeros.json", { "lm loss": numbers(3), "num-zeros": numbers(130) }), "")).toBe(false);
	expect(
		holds(values("loss.json", { "lm loss": numbers(3), "num-zeros": numbers(130) }), 'METRICS:\n  - "lm loss"\n'),
	).toBe(true);
	expect(() => holds(near, "METRICS:\n  - iteration-time\n")).toThrow("others are of speed");
	expect(() => holds(near, "METRICS:\n  - mtp_1 loss\n")).toThrow("has no mtp_1 loss");
});

test("a folder without weights is compared by its curve: ten losses, and the mean", () => {
	const reference = join(folder, "reference");
	mkdirSync(reference);
	const at = (loss: number) =>
		values("reference/golden_values.json", { "lm loss": [3 * loss, 2 * loss, loss], "grad-norm": [9, 9, 9] });
	at(1.004);
	const report = logParity(reference, log(), loose);
	expect(report.checks.map(({ name }) => name)).toEqual([
		"step 1 loss",
		"step 2 loss",
		"step 3 loss",
		"mean loss of 3 steps",
	]);
	expect(firstFailure(report)).toBeUndefined();
	at(1.008);
	expect(firstFailure(logParity(reference, log(), loose))?.name).toBe("mean loss of 3 steps");
});

test("a log may be a folder of TensorBoard events", () => {
	const events = join(folder, "own-events");
	mkdirSync(events);
	writeFileSync(
		join(events, "events.out.tfevents.1"),
		Buffer.concat([1, 2].map((step) => record(step, "grad-norm", step))),
	);
	const golden = values("norms.json", { "grad-norm": [1, 2, 3] });
	expect(logParity(golden, events, loose).checks.map(({ error }) => error)).toEqual([0, 0]);
});
