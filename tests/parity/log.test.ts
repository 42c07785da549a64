/** A run's log against golden values and TensorBoard events. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
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

test("equal values agree, times are not compared", () => {
	const report = logParity(goldenValues({ "1": 3.01, "2": 2, "3": 1 }), log(), 0.05);
	expect(report.checks).toHaveLength(3);
	expect(firstFailure(report)).toBeUndefined();
});

test("the first step that is off is named", () => {
	const report = logParity(goldenValues({ "1": 3, "2": 2.3, "3": 1.5 }), log(), 0.05);
	expect(firstFailure(report)?.name).toBe("step 2 lm loss");
});

test("nothing in common is an error", () => {
	expect(() => logParity(goldenValues({ "7": 3 }), log(), 0.05)).toThrow("no metric and step in common");
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
	const report = logParity(folder, log(), 0.05);
	expect(report.checks.map(({ name }) => name)).toEqual(["step 1 lm loss", "step 2 lm loss"]);
	expect(firstFailure(report)?.name).toBe("step 2 lm loss");
	events[20]! ^= 1;
	writeFileSync(path, events);
	expect(() => logParity(folder, log(), 0.05)).toThrow("does not match its checksum");
});

test("CRC-32C of the published check string", () => {
	// crc32c("123456789") = e3069283, masked by TFRecord's rotation and offset.
	const crc = 0xe3069283;
	expect(maskedCrc(Buffer.from("123456789"))).toBe((((crc >>> 15) | (crc << 17)) + 0xa282ead8) >>> 0);
});
