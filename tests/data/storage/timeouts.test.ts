/** Reads that get stuck end within their time limit, with a sentence that names the file and the server. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { DataTimeoutError } from "../../../src/data/energon/errors.ts";
import { openStorage, type StorageConfiguration } from "../../../src/data/energon/storage/open.ts";
import { CallWatcher } from "../../watch-calls.ts";
import { captions, Scratch } from "../fixtures.ts";
import { startStuckServer } from "./stuck-server.ts";

const scratch = new Scratch();
let base: string;
let stop: () => void;
let watcher: CallWatcher;
beforeAll(async () => {
	captions(scratch, "served/set", [7, 5, 9]);
	({ base, stop } = await startStuckServer(join(scratch.path, "served")));
	watcher = new CallWatcher(scratch.path);
}, 60_000);
afterAll(() => {
	stop();
	scratch[Symbol.dispose]();
});

const shard = "set/served/set-001.tar";
const seconds = 3;
let caches = 0;
function configuration(changed: Partial<StorageConfiguration> = {}): StorageConfiguration {
	const cache = { cacheFolder: join(scratch.path, `cache-${caches++}`), cacheBytes: 1 << 20 };
	return { ...cache, blockBytes: 2048, timeoutMilliseconds: 1000 * seconds, ...changed };
}

/** Reads the shard whole; the error, and the seconds until it came. */
function read(mode: string, changed: Partial<StorageConfiguration> = {}): { error: Error | null; took: number } {
	const began = performance.now();
	const took = () => (performance.now() - began) / 1000;
	try {
		const file = openStorage(configuration(changed)).open(`${base}/${mode}/${shard}`);
		file.read(0, file.size);
		return { error: null, took: took() };
	} catch (error) {
		return { error: error as Error, took: took() };
	}
}

describe("a server that", () => {
	// On a busy machine an answer may begin too late: no more is promised of the last failure.
	test.each([
		[
			"silent",
			"does not answer",
			/its size did not arrive within 3 s, in [23] attempts; the last failure: it gave no answer\.$/,
		],
		[
			"mute",
			"announces bytes that do not come",
			/bytes 0 to 2047 did not arrive within 3 s, in \d attempts?; the last failure: it (?:sent 0 of 2048 bytes|gave no answer)\.$/,
		],
		[
			"drip",
			"sends a byte each 0.2 s",
			/bytes 0 to 2047 did not arrive within 3 s, in \d attempts?; the last failure: it (?:sent \d+ of 2048 bytes|gave no answer)\.$/,
		],
	])("%s: %s", (mode, _, sentence) => {
		const { error, took } = read(mode);
		expect(error).toBeInstanceOf(DataTimeoutError);
		expect(error!.message).toStartWith(`data-timeout ${seconds}: ${base}/${mode}/${shard}: `);
		expect(error!.message).toMatch(sentence);
		expect(took).toBeGreaterThan(0.95 * seconds);
		expect(took).toBeLessThan(4 * seconds);
	});

	test("is mute, and asked again after each pause", () => {
		const { error } = read("mute", { stallMilliseconds: 200, attempts: 100, backoffMilliseconds: 1 });
		expect(error).toBeInstanceOf(DataTimeoutError);
		expect(Number(/in (\d+) attempts/.exec(error!.message)![1])).toBeGreaterThan(2);
	});

	test("announces more than was asked for is refused at once", () => {
		const { error } = read("long");
		expect(error!.message).toBe(`${base}/long/${shard}: the server sends more than the 2048 requested bytes.`);
	});

	test("loses the first connection of every range is read over others", () => {
		expect(read("lost", { timeoutMilliseconds: 30_000, stallMilliseconds: 250, readAhead: 8 }).error).toBeNull();
	});
});

const readKeys = [process.execPath, join(import.meta.dir, "read-keys.ts")];

test("a silent S3-compatible store is named with its server", () => {
	const command = [...readKeys, "s3://silent/set", JSON.stringify(configuration())];
	const env = { S3_ENDPOINT: base, S3_ACCESS_KEY_ID: "key", S3_SECRET_ACCESS_KEY: "secret" };
	const { exitCode, stderr } = Bun.spawnSync(command, { env: { ...process.env, ...env }, stderr: "pipe" });
	const [, shard, server] =
		/data-timeout 3: s3:\/\/silent\/set\/(\S+) \(on (\S+)\): its size did not arrive within 3 s, in /.exec(
			stderr.toString(),
		) ?? [];
	expect([exitCode, shard, server]).toEqual([1, expect.stringMatching(/set-00\d\.tar$/), new URL(base).host]);
	expect(stderr.toString()).not.toContain("X-Amz");
}, 30_000);

// The kernel holds the call as a file system does whose server is gone; a page of a mapped file cannot be held so.
test.each([
	["a shard that is opened first", "open served/set-000.tar", 1],
	["a shard of which samples are read", "open served/set-002.tar", 5],
	["an index", "open served/set-001.tar.idx", 3],
])(
	"a local file system that hangs is noticed: %s",
	(_, call, nth) => {
		if (!watcher.works) return;
		const folder = join(scratch.path, "served/set");
		const command = [...readKeys, folder, JSON.stringify(configuration())];
		const { exitCode, stderr, calls } = watcher.run(folder, { action: "hold", call, nth }, command);
		expect(calls.filter((one) => one === call).length).toBeGreaterThanOrEqual(nth);
		expect(stderr).toContain(
			`data-timeout 3: ${folder}/${call.slice("open ".length)} cannot be read, its file system gives no answer.`,
		);
		expect(exitCode).toBe(1);
	},
	60_000,
);
