/** Files that are brought to the disk while they are written. */
import { afterAll, expect, test } from "bun:test";
import { closeSync, mkdtempSync, openSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { OutputFile, WriteBack } from "../../src/checkpoint/files.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-write-back-"));
afterAll(() => rmSync(folder, { recursive: true }));

test("a large file has the written bytes", () => {
	const piece = crypto.getRandomValues(new Uint8Array(2 ** 16));
	const path = join(folder, "large");
	const hasher = new Bun.CryptoHasher("sha256");
	{
		using file = new OutputFile(path);
		for (let i = 0; i < 2 ** 12 + 3; i++) {
			piece[0] = i;
			hasher.update(piece);
			file.write(piece);
		}
		file.close();
	}
	expect(new Bun.CryptoHasher("sha256").update(readFileSync(path)).digest("hex")).toBe(hasher.digest("hex"));
});

test("a failure of the writing thread is thrown in this thread", async () => {
	// A file that cannot be synced: fsync fails with EINVAL.
	const fd = openSync("/dev/null", "w");
	let succeeded = true;
	// An fsync that the thread has not begun is no failure, and a busy machine may start the thread late.
	for (let wait = 100; succeeded && wait <= 12_800; wait *= 2) {
		const writeBack = new WriteBack(fd);
		writeBack.ask();
		await Bun.sleep(wait);
		succeeded = writeBack.end();
	}
	expect(succeeded).toBe(false);
	closeSync(fd);
	const unused = new WriteBack(fd);
	expect(unused.end()).toBe(true);
}, 60_000);
