/** Folders of models that replace each other in an S3 store, through a gate that makes requests fail. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { bringCopy, placedFolder } from "../../../src/checkpoint/remote/folder-copy.ts";
import { defaultRequests } from "../../../src/checkpoint/remote/requests.ts";
import { writeFolder } from "../../../src/checkpoint/remote/stored-folder.ts";
import { UserError } from "../../../src/system/errors.ts";
import { referencePython } from "../../reference/python.ts";
import { type Cause, causes, StoreServer } from "./store-server.ts";

const python = referencePython("moto");
const rounds = process.env.MIMO_TEST_FULL ? 24 : 1;
const tried: readonly Cause[] = process.env.MIMO_TEST_FULL
	? causes
	: ["cut after", "500", "403 for good", "404 of a part", "wrong bytes sent", "wrong bytes received"];
const folder = mkdtempSync(join(tmpdir(), "mimo-stored-"));
/** What the program asks stores with: it has them from nowhere else. */
const [before, variables] = [{ ...defaultRequests }, { ...process.env }];
let server: StoreServer;
beforeAll(async () => {
	if (python === null) return;
	server = await StoreServer.start(python);
	Object.assign(process.env, server.environment);
	Object.assign(defaultRequests, { backoffMilliseconds: 1, longestBackoff: 10 });
	Object.assign(defaultRequests, { partBytes: 4096, parallelParts: 2 });
});
afterAll(async () => {
	Object.assign(defaultRequests, before);
	for (const name of Object.keys(server?.environment ?? {})) delete process.env[name];
	Object.assign(process.env, variables);
	rmSync(folder, { recursive: true });
	await server?.[Symbol.asyncDispose]();
});

const url = "s3://bucket/models/a";
const staging = join(folder, "writer");

/** The files of a version; every other one has two more. */
function filesOf(version: number): Record<string, string> {
	const weights = Array.from({ length: 2000 }, (_, at) => `${Math.sin(at) * version}`).join();
	const more = version % 2 === 0 ? {} : { "b.safetensors": `b${weights}`, "merges.txt": `${version}` };
	return { "config.json": `{"version":${version}}`, "a.safetensors": weights, ...more };
}

async function write(version: number): Promise<void> {
	await writeFolder(url, { lineage: "run", replace: true, staging, sync: false }, (target) => {
		for (const [name, text] of Object.entries(filesOf(version))) writeFileSync(join(target, name), text);
	});
}

let count = 0;
/** The version that a reader with an empty disk finds there: all its files, and no others. */
async function read(): Promise<number> {
	const own = join(folder, `reader-${count++}`);
	try {
		await bringCopy({ url, staging: own, iteration: null });
		const copy = placedFolder(url, own);
		const found = Object.fromEntries(readdirSync(copy).map((name) => [name, readFileSync(join(copy, name), "utf8")]));
		const { version } = JSON.parse(found["config.json"]!) as { version: number };
		expect(found).toEqual(filesOf(version));
		return version;
	} finally {
		rmSync(own, { recursive: true, force: true });
	}
}

/** The result of a work, or the sentence with which it fails. */
async function tryTo<Result>(work: Promise<Result>): Promise<Result | string> {
	try {
		return await work;
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		return error.message;
	}
}

/** As `tryTo` while a request goes wrong, and whether it met one. A silent store is waited for the shorter while. */
async function withFault<Result>(cause: Cause, skip: number, work: () => Promise<Result>) {
	server.arm(cause, skip);
	Object.assign(defaultRequests, { stallMilliseconds: 3000 });
	const result = await tryTo(work());
	Object.assign(defaultRequests, { stallMilliseconds: before.stallMilliseconds });
	return { result, met: server.disarm() > 0 ? 1 : 0 };
}

test.skipIf(python === null)(
	`${rounds * tried.length} faults while folders replace each other: a reader finds a whole one or none`,
	async () => {
		let random = 11;
		const draw = (below: number) => {
			random = (random * 48271) % 2147483647;
			return random % below;
		};
		await write(1);
		let newest = 1;
		const table: Record<string, { hit: number; saved: number; refused: number; found: number; unread: number }> = {};
		for (const cause of tried) {
			const row = { hit: 0, saved: 0, refused: 0, found: 0, unread: 0 };
			table[cause] = row;
			for (let round = 0; round < rounds; round++) {
				const reads = cause === "wrong bytes received" || cause === "cut within the body" || cause === "truncated";
				if (
					cause === "wrong bytes received" ||
					(cause !== "404 of a part" && cause !== "wrong bytes sent" && draw(3) === 0)
				) {
					const { result, met } = await withFault(cause, draw(3), read);
					row.hit += met;
					if (typeof result === "string") row.unread++;
					else row.found++;
					expect(typeof result === "string" ? newest : result).toBe(newest);
					continue;
				}
				// A save has some 30 requests, of which one reads an object.
				const skip = reads ? 0 : draw(cause === "404 of a part" ? 8 : 14);
				const { result, met } = await withFault(cause, skip, async () => await write(newest + 1));
				row.hit += met;
				const found = await tryTo(read());
				if (typeof result !== "string") {
					row.saved++;
					newest++;
					expect(found).toBe(newest);
					continue;
				}
				row.refused++;
				const sentence = `${url} is not whole: it is being written, or what wrote it was cut off.`;
				expect([newest, newest + 1, sentence]).toContain(found);
				// The files are on the disk, all of them, and the same training puts them there.
				const [, kept] = / Its files are in (.*)\.$/.exec(result) ?? [];
				expect(readdirSync(kept!).sort()).toEqual(Object.keys(filesOf(newest + 1)).sort());
				await write(++newest);
				expect(existsSync(kept!)).toBeFalse();
				expect(await read()).toBe(newest);
			}
		}
		if (rounds > 1) console.table(table);
		const all = Object.values(table);
		expect(all.reduce((sum, { hit }) => sum + hit, 0)).toBeGreaterThanOrEqual(0.9 * rounds * tried.length);
		// Only a store that keeps refusing makes a save or a reading fail.
		for (const [cause, { refused, unread }] of Object.entries(table)) {
			if (cause !== "403 for good") expect({ cause, refused, unread }).toEqual({ cause, refused: 0, unread: 0 });
		}
	},
	rounds * 60_000,
);
