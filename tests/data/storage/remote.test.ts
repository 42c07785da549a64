/** Data sets on a server that stalls, cuts off, fails and changes; the same from an S3-compatible store. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { createHmac } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, statSync, utimesSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { SIGNATURE_BYTES } from "../../../src/data/energon/storage/block-cache.ts";
import { openStorage, type StorageConfiguration } from "../../../src/data/energon/storage/open.ts";
import { UserError } from "../../../src/system/errors.ts";
import { captions, Scratch } from "../fixtures.ts";
import { LyingServer } from "./lying-server.ts";
import { readKeys } from "./read-keys.ts";

const scratch = new Scratch();
let base: string;
let server: LyingServer;
let folder: string;
beforeAll(async () => {
	folder = captions(scratch, "served/set", [7, 5, 9]);
	server = await LyingServer.start(join(scratch.path, "served"));
	base = server.base;
});
afterAll(() => {
	server[Symbol.dispose]();
	scratch[Symbol.dispose]();
});

/** Blocks in a cache, by name. */
function blocks({ cacheFolder }: StorageConfiguration): string[] {
	const [folder] = readdirSync(cacheFolder!).filter((name) => name.startsWith("mimo-blocks-v1-"));
	const path = join(cacheFolder!, folder!);
	const names = readdirSync(path).filter((name) => /^[0-9a-f]{40}-\d+$/.test(name));
	return names.sort().map((name) => join(path, name));
}

let caches = 0;
function configuration(changed: Partial<StorageConfiguration> = {}): StorageConfiguration {
	const fast = { blockBytes: 2048, attempts: 4, backoffMilliseconds: 5, stallMilliseconds: 200 };
	return { ...fast, cacheFolder: join(scratch.path, `cache-${caches++}`), cacheBytes: 1 << 20, ...changed };
}

const shard = "set/served/set-001.tar";
const original = () => readFileSync(join(scratch.path, "served", shard));

describe("a server that", () => {
	for (const [mode, what] of [
		["fine", "answers"],
		["error", "answers 503 at first"],
		["truncate", "cuts its answers off at first"],
		["stall", "stalls at first"],
	] as const) {
		test(`${what} is read whole and in pieces`, () => {
			const file = openStorage(configuration()).open(`${base}/${mode}/${shard}`);
			const bytes = original();
			expect(file.size).toBe(bytes.length);
			expect(Buffer.from(file.read(0, file.size)).equals(bytes)).toBe(true);
			for (const [offset, length] of [
				[0, 1],
				[2047, 2],
				[5000, 4096],
				[bytes.length - 3, 100],
				[bytes.length, 10],
			] as const) {
				expect([...file.read(offset, length)]).toEqual([...bytes.subarray(offset, offset + length)]);
			}
		});
	}

	for (const [mode, message] of [
		["always", "could not be read in 4 attempts; the last failure: it answered 500"],
		["forbidden", "the server answered 403"],
		["whole", "sends whole files only, no byte ranges"],
	] as const) {
		test(`is "${mode}" is refused by name`, () => {
			const storage = openStorage(configuration());
			expect(() => storage.open(`${base}/${mode}/${shard}`)).toThrow(message);
			expect(() => storage.open(`${base}/${mode}/${shard}`)).toThrow(UserError);
		});
	}

	for (const [mode, message] of [
		["long", "the server sends more than the 2048 requested bytes"],
		["endless", "the server sends more than the 2048 requested bytes"],
		["deflated", 'the server compresses its answers ("deflate") although the request forbids it'],
		["elsewhere", 'the request was for bytes 2048-4095, and the answer has "bytes 0-2047/'],
		["huge", "the server says that the file has 9007199254740991 bytes, more than any file may have"],
		["nosize", "the server does not say how large the file is"],
		["grows", "changed while it was read: it had"],
	] as const) {
		test(`is "${mode}" is refused by URL and reason, and little of it is read`, async () => {
			const storage = openStorage(configuration());
			const url = `${base}/${mode}/${shard}`;
			const before = process.memoryUsage().rss;
			const read = () => {
				const file = storage.open(url);
				file.read(0, file.size);
			};
			expect(read).toThrow(message);
			expect(read).toThrow(url);
			expect(process.memoryUsage().rss - before).toBeLessThan(48 << 20);
			const log = (await (await fetch(`${base}/log`)).json()) as [string, string, number][];
			const sent = log.flatMap(([what, , bytes]) => (what === "sent" ? [bytes] : []));
			expect(Math.max(0, ...sent)).toBeLessThan(128 << 20);
		});
	}

	const elsewhere = "inside this machine's own network: --data-private-redirects allows it";
	for (const [mode, message] of [
		["away", elsewhere],
		["name", elsewhere],
		["loop", "the server redirects more than 10 times"],
		["scheme", 'the server redirects to "file:///etc/passwd", which is no address of HTTP'],
	] as const) {
		test(`redirects ("${mode}") is refused by the address`, () => {
			const url = `${base}/${mode}/${shard}?token=s3cret`;
			let sentence = "";
			try {
				openStorage(configuration()).open(url);
			} catch (error) {
				sentence = (error as Error).message;
			}
			expect(sentence).toContain(message);
			expect(sentence).toStartWith(`${base}/${mode}/${shard}: `);
			expect(sentence).not.toContain("s3cret");
		});
	}

	test("redirects is followed to its own address, and elsewhere where that is allowed", () => {
		for (const [mode, options] of [
			["around", configuration()],
			["away", configuration({ privateRedirects: true })],
		] as const) {
			const file = openStorage(options).open(`${base}/${mode}/${shard}`);
			expect(Buffer.from(file.read(0, file.size)).equals(original())).toBe(true);
		}
	});

	test("changes a file while it is read is noticed", () => {
		const file = openStorage(configuration()).open(`${base}/changing/${shard}`);
		expect(() => file.read(0, file.size)).toThrow("changed while it was read");
	});

	test("has no such file says so", () => {
		const storage = openStorage(configuration());
		expect(storage.isFile(`${base}/fine/nothing`)).toBe(false);
		expect(() => storage.open(`${base}/fine/nothing`)).toThrow("does not exist");
	});
});

describe("the cache", () => {
	const requests = async () => ((await (await fetch(`${base}/log`)).json()) as string[][]).length;

	test("serves what was read before, checks it, and fetches again what is damaged", async () => {
		const options = configuration();
		const read = () => {
			const file = openStorage(options).open(`${base}/fine/${shard}`);
			return Buffer.from(file.read(0, file.size));
		};
		expect(read().equals(original())).toBe(true);
		await Bun.sleep(50);
		const before = await requests();
		expect(read().equals(original())).toBe(true);
		expect((await requests()) - before).toBe(1);
		const block = blocks(options)[0]!;
		const bytes = readFileSync(block);
		bytes[100]! ^= 1;
		writeFileSync(block, bytes);
		expect(read().equals(original())).toBe(true);
		expect((await requests()) - before).toBe(3);
	});

	test("removes only its own files, and is private to the user", () => {
		const options = configuration({ cacheBytes: 1, readAhead: 0 });
		const own = join(options.cacheFolder!, "thesis.tex");
		mkdirSync(options.cacheFolder!);
		writeFileSync(own, "years");
		utimesSync(own, 0, 0);
		const read = () => openStorage(options).open(`${base}/fine/${shard}`).read(0, 4096);
		read();
		const [folder] = readdirSync(options.cacheFolder!).filter((name) => name !== "thesis.tex");
		const inside = join(options.cacheFolder!, folder!);
		writeFileSync(join(inside, "notes.txt"), "mine too");
		utimesSync(join(inside, "notes.txt"), 0, 0);
		openStorage(options).open(`${base}/fine/${shard}`).read(4096, 4096);
		expect(readFileSync(own, "utf8")).toBe("years");
		expect(readFileSync(join(inside, "notes.txt"), "utf8")).toBe("mine too");
		expect(statSync(inside).mode & 0o777).toBe(0o700);
		for (const path of blocks(options)) expect(statSync(path).mode & 0o777).toBe(0o600);
		expect(blocks(options)).toHaveLength(1);
	});

	test("accepts only blocks that are signed with its key for their name", () => {
		const options = configuration({ readAhead: 0 });
		const read = () => Buffer.from(openStorage(options).open(`${base}/fine/${shard}`).read(0, 8192));
		const whole = read();
		const [first, second] = blocks(options) as [string, string];
		const other = readFileSync(second);
		writeFileSync(first, other);
		expect(read().equals(whole)).toBe(true);
		// The planter knows everything but the key.
		const content = Buffer.alloc(2048, "EVIL");
		const forged = createHmac("sha256", Buffer.alloc(32))
			.update(`${basename(first)}\0`)
			.update(content)
			.digest();
		writeFileSync(first, Buffer.concat([content, forged]));
		expect(read().equals(whole)).toBe(true);
	});

	test("stays within its bound", () => {
		const limit = 3 * (2048 + SIGNATURE_BYTES);
		const options = configuration({ cacheBytes: limit, readAhead: 0 });
		const file = openStorage(options).open(`${base}/fine/${shard}`);
		expect(Buffer.from(file.read(0, file.size)).equals(original())).toBe(true);
		const held = blocks(options).reduce((sum, path) => sum + statSync(path).size, 0);
		expect(file.size).toBeGreaterThan(5 * 2048);
		expect(held).toBeGreaterThan(0);
		expect(held).toBeLessThanOrEqual(limit);
	});
});

test("a loader delivers the same samples from a failing server as from files", async () => {
	const expected = await readKeys(folder, configuration());
	for (const mode of ["error", "truncate"]) {
		expect(await readKeys(`${base}/${mode}/set`, configuration())).toEqual(expected);
	}
});

test("s3:// URLs are signed with the environment's credentials and read in ranges", async () => {
	const script = join(import.meta.dir, "read-keys.ts");
	const run = (environment: Record<string, string>) => {
		const command = [process.execPath, script, "s3://bucket/set", JSON.stringify(configuration())];
		const others = Object.entries(process.env).filter(([name]) => !/^(?:S3|AWS)_/.test(name));
		const env = { ...Object.fromEntries(others), ...environment };
		return Bun.spawnSync(command, { env, stdout: "pipe", stderr: "pipe" });
	};
	const credentials = { S3_ACCESS_KEY_ID: "key", S3_SECRET_ACCESS_KEY: "secret" };
	const signed = run({ S3_ENDPOINT: base, ...credentials });
	expect(JSON.parse(signed.stdout.toString())).toEqual(await readKeys(folder, configuration()));
	expect(run({}).stderr.toString()).toContain("s3://bucket/set/.nv-meta/.info.json cannot be requested: Missing S3");
	// What a failure says of a signed address does not let others use it.
	const failed = run({ S3_ENDPOINT: server.malformed, ...credentials }).stderr.toString();
	expect(failed).toContain("s3://bucket/set/.nv-meta/.info.json could not be read in 4 attempts; the last failure: ");
	expect(failed).not.toMatch(/X-Amz|Signature|Credential/);
});
