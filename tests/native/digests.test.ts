/** Sums of the library's thread are those of Bun, however the bytes of a file come. */
import { beforeAll, expect, test } from "bun:test";
import { closeSync, ftruncateSync, mkdtempSync, openSync, readdirSync, rmSync, writeSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { FileDigests } from "../../src/native/files.ts";
import { type Library, openLibrary } from "../../src/native/library.ts";

let library: Library;
beforeAll(async () => {
	library = await openLibrary("cpu");
});

/** Gives `use` a new file, open for reading and writing. */
function withFile(use: (descriptor: number) => void): void {
	const folder = mkdtempSync(join(tmpdir(), "mimo-digests-"));
	const descriptor = openSync(join(folder, "file"), "wx+");
	try {
		use(descriptor);
	} finally {
		closeSync(descriptor);
		rmSync(folder, { recursive: true });
	}
}

/** Bytes that repeat no sooner than a megabyte after. */
function noise(length: number): Uint8Array {
	let state = 1;
	return Uint8Array.from({ length }, () => {
		state = (state * 48271) % 2147483647;
		return state >> 8;
	});
}

test("digests of ranges of any length after a header, announced in pieces", () => {
	// Around a block, its padding, and the buffer of a lane; empty ones first, last and in a row.
	const lengths = [0, 1, 55, 56, 63, 64, 65, 119, 120, 65_535, 65_536, 65_537, 0, 0, 1_000_003, 7, 300_000, 0];
	const bytes = noise(2 ** 20 + 7);
	withFile((file) => {
		const header = 13;
		writeSync(file, bytes, 0, header, 0);
		using digests = new FileDigests(library, { path: "a file", descriptor: file, position: header });
		let position = header;
		let step = 1;
		const expected = lengths.map((length, index) => {
			const range = bytes.subarray(index, index + length);
			digests.range(length);
			for (let at = 0; at < length; at += step, step = (step * 7) % 99_991) {
				position += writeSync(file, range, at, Math.min(step, length - at), position);
				digests.written(position);
			}
			return new Bun.CryptoHasher("sha256").update(range).digest("hex");
		});
		expect(digests.wait()).toEqual(expected);
		// More may follow.
		digests.range(1);
		writeSync(file, bytes, 0, 1, position);
		digests.written(position + 1);
		expect(digests.wait()).toEqual([
			...expected,
			new Bun.CryptoHasher("sha256").update(bytes.subarray(0, 1)).digest("hex"),
		]);
	});
});

test("a file that lacks what was written is an error, and so is a wait for what was not", () => {
	withFile((file) => {
		using digests = new FileDigests(library, { path: "a file", descriptor: file, position: 0 });
		expect(digests.wait()).toEqual([]);
		digests.range(1000);
		expect(() => digests.wait()).toThrow("mimo_digests_wait needs written_ >= next_");
		writeSync(file, noise(1000));
		ftruncateSync(file, 999);
		digests.written(1000);
		expect(() => digests.wait()).toThrow("Cannot read back a file: it lacks what was written.");
	});
});

test("abandoned digests end their thread", () => {
	const threads = () => readdirSync("/proc/self/task").length;
	withFile((file) => {
		const before = threads();
		const count = 40;
		for (let i = 0; i < count; i++) {
			using digests = new FileDigests(library, { path: "a file", descriptor: file, position: 0 });
			digests.range(1000);
		}
		// The runtime starts a few threads of its own.
		expect(threads() - before).toBeLessThan(count / 2);
	});
});
