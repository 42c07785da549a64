/** Saves to and loads from an S3 server through a gate that makes requests fail: 13 kinds of faults, 300 of them under --full. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { applyRetention } from "../../../src/checkpoint/native/save-thread.ts";
import { NativeSave, writeShard } from "../../../src/checkpoint/native/writer.ts";
import { ObjectStore } from "../../../src/checkpoint/remote/object-store.ts";
import { defaultRequests } from "../../../src/checkpoint/remote/requests.ts";
import { StagedStore } from "../../../src/checkpoint/remote/staged-store.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { UserError } from "../../../src/system/errors.ts";
import { referencePython } from "../../reference/python.ts";
import { type Cause, causes, StoreServer } from "./store-server.ts";

const python = referencePython("moto");
const rounds = process.env.MIMO_TEST_FULL ? 24 : 1;
const tried: readonly Cause[] = process.env.MIMO_TEST_FULL
	? causes
	: [
			"cut after",
			"truncated",
			"503 four times",
			"403 for good",
			"404 of a part",
			"wrong bytes sent",
			"wrong bytes received",
		];
const folder = mkdtempSync(join(tmpdir(), "mimo-staged-"));
afterAll(() => rmSync(folder, { recursive: true }));

let server: StoreServer;
beforeAll(async () => {
	if (python !== null) server = await StoreServer.start(python);
});
afterAll(async () => await server?.[Symbol.asyncDispose]());

/** Quick to give up on a silent connection; of parts so small that every rank sends three. */
const requests = {
	...defaultRequests,
	...{ backoffMilliseconds: 1, longestBackoff: 10, stallMilliseconds: 1000, partBytes: 4096, parallelParts: 2 },
};
const ranks = 2;
const elements = 2500;

let count = 0;
/** A store of this test, with a local folder of its own; `direct`: not through the gate. */
function open(url: string, direct = false): StagedStore {
	const environment = direct ? { ...server.environment, AWS_ENDPOINT_URL: server.direct } : server.environment;
	return new StagedStore(url, join(folder, String(count++)), direct ? defaultRequests : requests, environment);
}

/** The values of a tensor of a step. */
function values(step: number, rank: number): Float32Array {
	return Float32Array.from({ length: elements }, (_, at) => Math.fround(Math.sin(at + 1000 * rank) * step));
}

/** What the threads of the ranks do in a save (save-worker.ts), with a local folder for each rank: none sees another's disk. */
async function save(
	stores: readonly StagedStore[],
	step: number,
	keep: number | null = null,
	foreign = false,
): Promise<void> {
	const [first] = stores;
	const saving = NativeSave.begin(first!.folder, step);
	const name = saving.folder.slice(saving.folder.lastIndexOf("/") + 1);
	for (const [rank, store] of stores.entries()) {
		const own = { folder: join(store.folder, name), name: `iter_${String(step).padStart(7, "0")}` };
		mkdirSync(join(own.folder, "data"), { recursive: true });
		const box = {
			name: "w",
			dtype: "F32" as const,
			shape: [ranks, elements],
			offsets: [rank, 0],
			sizes: [1, elements],
		};
		const report = writeShard(own.folder, rank, [{ ...box, data: () => values(step, rank) }], {
			suffix: store.suffix(own),
		});
		await store.deliver(own, rank, report);
	}
	const own = { folder: saving.folder, name: `iter_${String(step).padStart(7, "0")}` };
	const reports = await first!.collect(own, ranks);
	const objects = { "data.json": { encoding: "json" as const, bytes: new TextEncoder().encode(`[${step}]`) } };
	await saving.publish(
		reports,
		{ generator: "test", model: {}, common: { step }, objects },
		{
			suffix: first!.suffix(own),
			commit: async (latest) => await first!.commit(own, latest, { foreign }),
		},
	);
	await applyRetention(first!, { keep });
}

/** Loads the newest checkpoint as a run does, and compares every value with those of its step, which is returned. */
async function load(store: StagedStore, part = 0, parts = 1): Promise<number> {
	await store.refresh();
	using index = NativeCheckpoint.openExactly(store.folder);
	// A URL may be a checkpoint itself.
	const name = index.path === store.folder ? "" : basename(index.path);
	for (let at = part; at < parts; at++) await store.bring(name, { part: at, parts });
	return requireRight(store.folder);
}

/** Compares everything in a checkpoint with what was saved in its step, which is returned. */
function requireRight(path: string): number {
	using checkpoint = NativeCheckpoint.openExactly(path);
	checkpoint.verify();
	const step = checkpoint.manifest.iteration!;
	expect(checkpoint.manifest.common.step).toBe(step);
	expect(readTensor(checkpoint, "w")).toEqual(Float32Array.from([...values(step, 0), ...values(step, 1)]));
	expect(new TextDecoder().decode(checkpoint.readObject("data.json"))).toBe(`[${step}]`);
	return step;
}

/** Every checkpoint that the store shows to a reader without faults, all whole and right, and the step of the newest. */
async function shown(url: string): Promise<{ readonly names: readonly string[]; readonly newest: number | null }> {
	const store = open(url, true);
	await store.refresh();
	const names = readdirSync(store.folder)
		.filter((name) => name.startsWith("iter_"))
		.sort();
	const [newest] = [NativeCheckpoint.openExactly(store.folder).manifest.iteration];
	for (const name of names) {
		await store.bring(name, { part: 0, parts: 1 });
		requireRight(join(store.folder, name));
	}
	rmSync(store.folder, { recursive: true });
	return { names, newest };
}

const stores = (url: string) => Array.from({ length: ranks }, () => open(url));

test.skipIf(python === null)(
	"saves, loads in two shares, deletes old checkpoints, and leaves nothing else",
	async () => {
		const url = "s3://bucket/a run/first";
		const own = stores(url);
		for (const store of own) await store.refresh();
		await own[0]!.probe();
		for (const step of [1, 2, 3]) await save(own, step, 2);
		expect(await load(open(url), 0, 2)).toBe(3);
		expect(await shown(url)).toEqual({ names: ["iter_0000002", "iter_0000003"], newest: 3 });
		const keys = (await new ObjectStore(url, requests, server.environment).list()).map(({ key }) => key);
		expect(
			keys.filter(
				(key) =>
					!/^(latest\.json|iter_000000[23]\/(index\.json|objects-\w+\.safetensors|data\/r0000[01]-000-\w+\.safetensors))$/.test(
						key,
					),
			),
		).toEqual([]);
		expect(keys).toHaveLength(9);
		// Nothing of a rank's values stays on its disk.
		expect(
			readdirSync(own[1]!.folder, { recursive: true }).filter((name) => String(name).endsWith(".safetensors")),
		).toEqual([]);
	},
);

test.skipIf(python === null)(
	"a damaged or half-brought local copy is brought again, from where it was cut",
	async () => {
		const url = "s3://bucket/copies";
		const own = stores(url);
		await save(own, 5);
		const store = open(url);
		expect(await load(store)).toBe(5);
		const data = join(store.folder, "iter_0000005/data");
		const [one, two] = readdirSync(data).sort() as [string, string];
		const bytes = await Bun.file(join(data, one)).bytes();
		rmSync(join(data, one));
		// As a process that was killed leaves it.
		writeFileSync(join(data, `${one}.part-0`), bytes.subarray(0, 3000));
		truncateSync(join(data, two), 100);
		server.seen.length = 0;
		expect(await load(store)).toBe(5);
		expect(server.seen.filter((line) => line.includes(`"range":"bytes=3000-`))).toHaveLength(1);
		expect(existsSync(join(data, `${one}.part-0`))).toBeFalse();
		// At rest in the store.
		const { bytes: right } = (await new ObjectStore(url, requests, server.environment).get(
			`iter_0000005/data/${one}`,
		))!;
		right[right.length - 1]! ^= 1;
		await new ObjectStore(url, requests, server.environment).put(`iter_0000005/data/${one}`, Uint8Array.from(right));
		await expect(load(open(url))).rejects.toThrow(
			`${url}/iter_0000005/data/${one} is damaged: the checksum of w@0.0 differs.`,
		);
	},
);

test.skipIf(python === null)(
	"of two runs that save to one place the second to come says so and changes nothing",
	async () => {
		const url = "s3://bucket/two";
		const [own, other] = [stores(url), stores(url)];
		for (const store of [...own, ...other]) await store.refresh();
		await save(own, 4);
		await expect(save(other, 8)).rejects.toThrow(
			`${url}/latest.json was put there while this run trained, by another run: --save-over`,
		);
		expect(await load(open(url))).toBe(4);
		// Both believe in the same latest.json, and both save step 4 for the first time: the index decides.
		rmSync(join(own[0]!.folder, "iter_0000004/index.etag"));
		await expect(save(own, 4)).rejects.toThrow(`${url}/iter_0000004 was put there while this run trained`);
		await save(other, 4, null, true);
		expect(await load(open(url))).toBe(4);
		expect(await shown(url)).toEqual({ names: ["iter_0000004"], newest: 4 });
	},
);

test.skipIf(python === null)("a plain HTTP server gives its newest checkpoint, also without byte ranges", async () => {
	const url = "s3://bucket/served";
	const own = stores(url);
	for (const step of [1, 2]) await save(own, step);
	const objects = new ObjectStore(url, requests, server.environment);
	let ranges = true;
	using files = Bun.serve({
		port: 0,
		hostname: "127.0.0.1",
		fetch: async (request) => {
			const found = await objects.get(new URL(request.url).pathname.slice(1));
			if (found === null) return new Response("no", { status: 404 });
			const [, begin] = /^bytes=(\d+)-/.exec(request.headers.get("range") ?? "") ?? [];
			if (!ranges || begin === undefined) return new Response(found.bytes);
			const { length } = found.bytes;
			const headers = { "content-range": `bytes ${begin}-${length - 1}/${length}` };
			return new Response(found.bytes.slice(Number(begin)), { status: 206, headers });
		},
	});
	const address = `http://127.0.0.1:${files.port}`;
	expect(await load(open(address))).toBe(2);
	ranges = false;
	expect(await load(open(`${address}/iter_0000001`))).toBe(1);
	const empty = open(`${address}/none`);
	await empty.refresh();
	expect(readdirSync(empty.folder)).toEqual([]);
});

test.skipIf(python === null)(
	"what a killed save has left is not a checkpoint, and a later save removes it when it is old",
	async () => {
		const url = "s3://bucket/killed";
		const own = stores(url);
		await save(own, 1);
		const direct = new ObjectStore(url, requests, server.environment);
		await direct.put("iter_0000002/data/r00000-000-dead.safetensors", Uint8Array.of(1));
		expect(await shown(url)).toEqual({ names: ["iter_0000001"], newest: 1 });
		await save(own, 3);
		// It may be another run's, which still writes.
		expect((await direct.list("iter_0000002/")).length).toBe(1);
	},
);

test.skipIf(python === null)(
	`${rounds * tried.length} faults in saves and loads: nothing is lost, nothing is half visible`,
	async () => {
		const table = new Map<Cause, { hit: number; saved: number; refused: number; loaded: number; unread: number }>();
		let random = 7;
		const draw = (below: number) => {
			random = (random * 48271) % 2147483647;
			return random % below;
		};
		const url = "s3://bucket/faults";
		let own = stores(url);
		await save(own, 1);
		let newest = 1;
		for (const cause of tried) {
			const row = { hit: 0, saved: 0, refused: 0, loaded: 0, unread: 0 };
			table.set(cause, row);
			for (let round = 0; round < rounds; round++) {
				const step = newest + 1;
				// A save with this many layers of requests has some 24 of them; a load, 6.
				const inLoad = cause === "wrong bytes received" || (!inSaves.includes(cause) && draw(3) === 0);
				const reads = cause === "cut within the body" || cause === "truncated";
				if (!inLoad) {
					server.arm(cause, draw(reads ? 3 : cause === "404 of a part" ? 6 : cause === "wrong bytes sent" ? 12 : 22));
					try {
						await save(own, step, 2);
						row.saved++;
						newest = step;
					} catch (error) {
						if (!(error instanceof UserError)) throw error;
						row.refused++;
					}
					row.hit += server.disarm() > 0 ? 1 : 0;
				} else {
					server.arm(cause, draw(reads || cause === "wrong bytes received" ? 5 : 6));
					try {
						expect(await load(open(url))).toBe(newest);
						row.loaded++;
					} catch (error) {
						if (!(error instanceof UserError)) throw error;
						row.unread++;
					}
					row.hit += server.disarm() > 0 ? 1 : 0;
				}
				// A save that ended with an error may be there all the same, whole: its last answer was lost.
				const found = await shown(url);
				expect([newest, step]).toContain(found.newest!);
				expect(found.names.length).toBeGreaterThanOrEqual(Math.min(2, newest));
				newest = found.newest!;
				if (cause === "403 for good") own = await reopened(url);
			}
		}
		if (rounds > 1) console.table(Object.fromEntries(table));
		const all = [...table.values()];
		expect(all.reduce((sum, { hit }) => sum + hit, 0)).toBeGreaterThanOrEqual(0.9 * rounds * tried.length);
		// Only a store that keeps refusing makes a save or a load fail.
		for (const [cause, { refused, unread }] of table) {
			if (cause !== "403 for good") expect({ cause, refused, unread }).toEqual({ cause, refused: 0, unread: 0 });
		}
	},
	rounds * 60_000,
);

/** Faults of requests that only saves make. */
const inSaves: readonly Cause[] = ["404 of a part", "wrong bytes sent"];

/** The run starts again. */
async function reopened(url: string): Promise<StagedStore[]> {
	const own = stores(url);
	for (const store of own) await store.refresh();
	return own;
}
