/** The file in the host's memory in which a rank keeps its state for a restart. */
import { expect, test } from "bun:test";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { KeptFile } from "../../../src/train/restart/kept-file.ts";

function emptyFile(): string {
	const path = join(mkdtempSync(join(tmpdir(), "mimo-kept-")), "kept");
	writeFileSync(path, "");
	return path;
}

function keep(file: KeptFile, step: number): void {
	file.size(5000);
	file.makeRoom();
	file.setRecord(0, { step });
	file.job = { training: "first", saves: false };
	file.finish(0, step);
}

test("a step is there for its rank and its layout alone", () => {
	const path = emptyFile();
	const owner = { layout: 0, rank: 2 };
	using first = new KeptFile(path, owner);
	keep(first, 7);
	using again = new KeptFile(path, owner);
	expect([again.step(0), again.slotOf(7), again.record(0), again.job]).toEqual([
		7,
		0,
		{ step: 7 },
		{ training: "first", saves: false },
	]);
	// The host takes the place of another rank: this one's state is not that rank's.
	using other = new KeptFile(path, { layout: 0, rank: 0 });
	expect([other.slotOf(7), other.job]).toEqual([null, null]);
	keep(other, 9);
	using fewer = new KeptFile(path, { layout: 1, rank: 0 });
	expect(fewer.slotOf(9)).toBeNull();
});

test("a copy that ends half way leaves no record of the job behind", () => {
	const path = emptyFile();
	const owner = { layout: 0, rank: 0 };
	using from = new KeptFile(emptyFile(), owner);
	keep(from, 5);
	using file = new KeptFile(path, owner);
	file.expect(0, from.lengths(0));
	const [tensors, record, job] = from.rangesOf(0);
	expect(file.rangesOf(0)).toEqual([tensors!, record!, job!]);
	using after = new KeptFile(path, owner);
	expect([after.slotOf(5), after.job]).toEqual([null, null]);
	for (const range of [tensors!, record!, job!]) {
		const bytes = new Uint8Array(range.bytes);
		from.read(bytes, range.at);
		file.write(bytes, range.at);
	}
	file.finish(0, 5);
	expect([file.slotOf(5), file.record(0), file.job]).toEqual([0, { step: 5 }, from.job]);
});
