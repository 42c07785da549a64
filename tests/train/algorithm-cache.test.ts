/** The cache of algorithm choices: its file by user and GPU, equal choices on all ranks, and when choices are added. */
import { afterAll, expect, test } from "bun:test";
import { chmodSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { TrainingConfiguration } from "../../src/config/schema.ts";
import type { Group } from "../../src/parallel/group.ts";
import type { World } from "../../src/parallel/world.ts";
import { AlgorithmCache } from "../../src/train/algorithm-cache.ts";

const scratch = mkdtempSync(join(tmpdir(), "mimo-algorithms-"));
afterAll(() => rmSync(scratch, { recursive: true }));

const product = "product sizes 8 8 8\tabcd\t1.00\t2.00\t5";
const attention = "attention length 8\teng1_k2=3\t3.00\t3.00\t2";

/** A GPU that has timed the algorithms `timed`, in a world of one rank; `taken` are the choices that it was given. */
function gpu(timed: string, { versions = "cuBLASLt 13.1 (/a/b); NCCL 2.28", others = [] as Int32Array[] } = {}) {
	const taken: string[] = [];
	const group = { size: 1, rank: 0, ranks: [0, 7], exchange: (words: Int32Array) => [words, ...others] };
	const device = {
		library: { kind: "cuda", versions },
		describe: () => ({ name: "H200", threads: 132 }),
		setAlgorithms: (choices: string) => taken.push(choices),
		timeAlgorithms: () => 0,
		timedAlgorithms: () => timed,
	};
	const world = { device, size: 1, rank: 0, group: async () => group as unknown as Group };
	return { taken, world: world as unknown as World };
}

const configuration = (folder: string, choice = "timed") =>
	({ algorithmChoice: choice, algorithmCacheFolder: folder }) as unknown as TrainingConfiguration;

let folders = 0;
const newFolder = () => join(scratch, String(folders++));

/** Runs once with an empty cache and keeps the timed choices; returns the file. */
async function timedFile(folder: string): Promise<string> {
	const cache = (await AlgorithmCache.open(configuration(folder), gpu(`${product}\n`).world))!;
	cache.keep();
	return cache.path;
}

test("a run takes nothing that it timed itself; the next run takes it", async () => {
	const folder = newFolder();
	const first = gpu(`${product}\n`);
	const cache = (await AlgorithmCache.open(configuration(folder), first.world))!;
	expect(cache.keep()).toBe(`Timed 1 algorithms for later runs: ${cache.path}.`);
	expect(first.taken).toEqual([""]);
	expect(statSync(cache.path).mode & 0o777).toBe(0o600);
	const second = gpu("");
	await AlgorithmCache.open(configuration(folder, "cached"), second.world);
	expect(second.taken).toEqual([product]);
});

test("what is timed later is added; what was chosen stays", async () => {
	const folder = newFolder();
	const path = await timedFile(folder);
	const other = product.replace("abcd", "ffff");
	(await AlgorithmCache.open(configuration(folder), gpu(`${other}\n${attention}\n`).world))!.keep();
	expect(readFileSync(path, "utf8").split("\n").slice(1)).toEqual([product, attention, ""]);
});

test("a run that only takes choices times nothing", async () => {
	const folder = newFolder();
	const cache = (await AlgorithmCache.open(configuration(folder, "cached"), gpu(`${product}\n`).world))!;
	expect(cache.keep()).toBeNull();
	expect(readdirSync(join(cache.path, ".."))).toEqual([]);
});

test("nothing is read unless it is asked for", async () => {
	expect(await AlgorithmCache.open(configuration(newFolder(), "heuristic"), gpu("").world)).toBeNull();
});

test("another version of a library has another file; its place and NCCL do not matter", async () => {
	const folder = newFolder();
	const path = await timedFile(folder);
	const fileOf = async (versions: string) =>
		(await AlgorithmCache.open(configuration(folder), gpu("", { versions }).world))!.path;
	expect(await fileOf("cuBLASLt 13.1 (/elsewhere); NCCL 2.29")).toBe(path);
	expect(await fileOf("cuBLASLt 13.2 (/a/b); NCCL 2.28")).not.toBe(path);
});

test("a file that others can read, or that is damaged, is refused", async () => {
	const folder = newFolder();
	const path = await timedFile(folder);
	const open = () => AlgorithmCache.open(configuration(folder), gpu("").world);
	chmodSync(path, 0o644);
	await expect(open()).rejects.toThrow(`${path} holds no algorithms that this user's runs timed`);
	chmodSync(path, 0o600);
	writeFileSync(path, readFileSync(path, "utf8").slice(0, -3));
	await expect(open()).rejects.toThrow("remove it");
});

test("ranks that find other choices than the first are refused by name", async () => {
	const { world } = gpu("", { others: [Int32Array.of(1, 2)] });
	await expect(AlgorithmCache.open(configuration(newFolder()), world)).rejects.toThrow(
		"Rank 7 has another GPU, other libraries or other timed algorithms than rank 0",
	);
});
