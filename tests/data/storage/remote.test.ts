/** Data sets on a server that stalls, cuts off, fails and changes; the same from an S3-compatible store. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { createHmac } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, statSync, utimesSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { SIGNATURE_BYTES } from "../../../src/data/energon/storage/block-cache.ts";
import { openStorage, type StorageConfiguration } from "../../../src/data/energon/storage/open.ts";
import { UserError } from "../../../src/system/errors.ts";
import { captions, Scratch } from "../fixtures.ts";
import { readKeys } from "./read-keys.ts";

/** Serves files of FOLDER in a process of its own: reading waits for it, so it cannot be here. */
const serverText = `
const [folder] = process.argv.slice(-1);
const seen = new Map();
const log = [];
const server = Bun.serve({ port: 0, hostname: "127.0.0.1", idleTimeout: 60, async fetch(request) {
	const { pathname, searchParams } = new URL(request.url);
	if (pathname === "/log") return Response.json(log);
	const [, mode, ...rest] = pathname.split("/");
	const range = /bytes=(\\d+)-(\\d+)/.exec(request.headers.get("range") ?? "");
	const path = rest.join("/");
	log.push([mode, path, range?.[1]]);
	const key = mode + path + range?.[1];
	const times = (seen.get(key) ?? 0) + 1;
	seen.set(key, times);
	const file = Bun.file(folder + "/" + path);
	if (!(await file.exists())) return new Response("no", { status: 404 });
	if (mode === "forbidden") return new Response("no", { status: 403 });
	if (mode === "whole") return new Response(await file.bytes());
	if (mode === "error" && times < 3) return new Response("busy", { status: 503 });
	if (mode === "always") return new Response("broken", { status: 500 });
	if (mode === "bucket" && !searchParams.has("X-Amz-Signature")) return new Response("unsigned", { status: 403 });
	if (mode === "bucket" && searchParams.has("X-Amz-Signature") && request.method !== "GET") return new Response("", { status: 403 });
	const size = file.size;
	const [from, to] = [Number(range[1]), Math.min(size - 1, Number(range[2]))];
	if (from >= size) return new Response("", { status: 416, headers: { "content-range": "bytes */" + size } });
	const bytes = new Uint8Array(await file.slice(from, to + 1).arrayBuffer());
	const etag = mode === "changing" ? '"' + times + (from > 0 ? "b" : "a") + '"' : '"' + size + '"';
	const headers = { "content-range": \`bytes \${from}-\${to}/\${size}\`, etag };
	if (mode === "truncate" && times < 2 && bytes.length > 10) return new Response(bytes.subarray(0, bytes.length >> 1), { status: 206, headers });
	if (mode === "stall" && times < 2 && bytes.length > 10) {
		const body = new ReadableStream({ async pull(c) { c.enqueue(bytes.subarray(0, 5)); await Bun.sleep(5000); c.close(); } });
		return new Response(body, { status: 206, headers });
	}
	const isTar = path.endsWith(".tar") && bytes.length > 10;
	const answer = (body, changed = {}) => new Response(body, { status: 206, headers: { ...headers, ...changed } });
	if (mode === "long" && isTar) return answer(Buffer.concat([bytes, Buffer.alloc(1 << 20)]));
	if (mode === "endless" && isTar) {
		// Ends after 256 MiB: a reader that takes all of it shows in the amount that the server has sent.
		let sent = 0;
		const pull = (c) => {
			if (sent >= 256 << 20) return c.close();
			sent += 1 << 20;
			log.push(["sent", path, sent]);
			c.enqueue(new Uint8Array(1 << 20));
		};
		return answer(new ReadableStream({ pull }));
	}
	if (mode === "deflated" && isTar) {
		const body = Bun.deflateSync(Buffer.alloc(64 << 20));
		return answer(body, { "content-encoding": "deflate" });
	}
	if (mode === "elsewhere" && isTar && from > 0) return answer(bytes, { "content-range": \`bytes 0-\${to - from}/\${size}\` });
	if (mode === "huge") return answer(bytes, { "content-range": \`bytes \${from}-\${to}/9007199254740991\` });
	if (mode === "nosize") return answer(bytes, { "content-range": \`bytes \${from}-\${to}/*\` });
	if (mode === "grows") return answer(bytes, { etag: '"same"', "content-range": \`bytes \${from}-\${to}/\${from > 0 ? size + 1 : size}\` });
	return answer(bytes);
} });
console.log(server.port);
`;

const scratch = new Scratch();
let base: string;
let server: Bun.Subprocess<"ignore", "pipe", "inherit">;
let folder: string;
beforeAll(async () => {
	folder = captions(scratch, "served/set", [7, 5, 9]);
	const script = scratch.file("server.ts", serverText);
	server = Bun.spawn([process.execPath, script, join(scratch.path, "served")], { stdin: "ignore", stdout: "pipe" });
	const { value } = await server.stdout.getReader().read();
	base = `http://127.0.0.1:${new TextDecoder().decode(value).trim()}`;
});
afterAll(() => {
	server.kill();
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
	const signed = run({ S3_ENDPOINT: base, S3_ACCESS_KEY_ID: "key", S3_SECRET_ACCESS_KEY: "secret" });
	expect(JSON.parse(signed.stdout.toString())).toEqual(await readKeys(folder, configuration()));
	expect(run({}).stderr.toString()).toContain("s3://bucket/set/.nv-meta/.info.json cannot be requested: Missing S3");
});
