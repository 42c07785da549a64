import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
	cpSync,
	existsSync,
	mkdtempSync,
	readdirSync,
	readFileSync,
	renameSync,
	rmSync,
	truncateSync,
	writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { isCheckpoint, NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { applyRetention, SaveThread } from "../../../src/checkpoint/native/save-thread.ts";
import { NativeSave, type ShardEntry, writeShard } from "../../../src/checkpoint/native/writer.ts";
import { openStore } from "../../../src/checkpoint/remote/checkpoint-store.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { randomValues } from "../../support.ts";

let folder: string;
let roots = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-native-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const newRoot = () => join(folder, `root-${roots++}`);
const matrix = randomValues(6 * 8, 3);

/** Columns [4r, 4r + 4) of the matrix, rows of it for rank 0 of `vector`. */
function entriesOf(rank: number): ShardEntry[] {
	const half = new Float32Array(6 * 4);
	for (let row = 0; row < 6; row++) half.set(matrix.subarray(row * 8 + rank * 4, row * 8 + rank * 4 + 4), row * 4);
	const entries: ShardEntry[] = [
		{ name: "matrix", dtype: "F32", shape: [6, 8], offsets: [0, 4 * rank], sizes: [6, 4], data: () => half },
	];
	if (rank === 0) {
		const bits = Uint16Array.of(0x3f80, 0x4000);
		entries.push(
			{ name: "vector", dtype: "BF16", shape: [2], offsets: [0], sizes: [2], data: () => bits },
			{ name: "step", dtype: "I64", shape: [], offsets: [], sizes: [], data: () => BigInt64Array.of(5n) },
		);
	}
	return entries;
}

const description = {
	generator: "test",
	model: { hiddenSize: 8 },
	common: { consumedSamples: 12, nested: { b: [1.5, null], a: "x" } },
	objects: { "rng/0": { encoding: "raw" as const, bytes: Uint8Array.of(1, 2, 3) } },
};

async function save(root: string, iteration: number | null, ranks = [0, 1]): Promise<string> {
	const saving = NativeSave.begin(root, iteration);
	const reports = ranks.map((rank) => writeShard(saving.folder, rank, entriesOf(rank)));
	return await saving.publish(JSON.parse(JSON.stringify(reports)), description);
}

/** Overwrites one byte. */
function flip(path: string, position: number): void {
	const bytes = readFileSync(path);
	bytes[position]! ^= 1;
	writeFileSync(path, bytes);
}

test("tensors that several ranks write in parallel read back equal", async () => {
	const root = newRoot();
	const saved = await save(root, 100);
	expect(saved).toBe(join(root, "iter_0000100"));
	using checkpoint = NativeCheckpoint.open(root);
	expect(checkpoint.notice).toBeNull();
	expect(checkpoint.manifest.iteration).toBe(100);
	expect(checkpoint.manifest.common).toEqual(description.common);
	expect(readTensor(checkpoint, "matrix")).toEqual(matrix);
	expect(readTensor(checkpoint, "vector")).toEqual(Uint16Array.of(0x3f80, 0x4000));
	expect(readTensor(checkpoint, "step")).toEqual(BigInt64Array.of(5n));
	expect(checkpoint.readObject("rng/0")).toEqual(Uint8Array.of(1, 2, 3));
	checkpoint.verify();
	for (let part = 0; part < 3; part++) checkpoint.verify({ part, parts: 3 });
	using direct = NativeCheckpoint.open(saved);
	expect(direct.path).toBe(saved);
});

test("any range of a tensor in uneven chunks", async () => {
	const root = newRoot();
	const shape = [5, 7, 3];
	const values = randomValues(105, 9);
	const at = (i: number, j: number, k: number) => values[(i * 7 + j) * 3 + k]!;
	const boxes = [
		{ offsets: [0, 0, 0], sizes: [5, 2, 3] },
		{ offsets: [0, 2, 0], sizes: [2, 5, 2] },
		{ offsets: [2, 2, 0], sizes: [3, 5, 2] },
		{ offsets: [0, 2, 2], sizes: [5, 5, 1] },
	];
	const saving = NativeSave.begin(root, 1);
	const reports = boxes.map(({ offsets, sizes }, rank) => {
		const box: number[] = [];
		for (let i = 0; i < sizes[0]!; i++)
			for (let j = 0; j < sizes[1]!; j++)
				for (let k = 0; k < sizes[2]!; k++) box.push(at(offsets[0]! + i, offsets[1]! + j, offsets[2]! + k));
		const data = () => Float32Array.from(box);
		return writeShard(saving.folder, rank, [{ name: "w", dtype: "F32", shape, offsets, sizes, data }]);
	});
	await saving.publish(reports, { generator: "test", model: {}, common: {} });
	using checkpoint = NativeCheckpoint.open(root);
	expect(readTensor(checkpoint, "w")).toEqual(values);
	const whole = new Uint8Array(values.buffer);
	for (let begin = 0; begin < whole.length; begin += 13) {
		const range = new Uint8Array(Math.min(61, whole.length - begin));
		checkpoint.readInto("w", begin, range);
		expect(range).toEqual(whole.slice(begin, begin + range.length));
	}
});

test("the manifest does not depend on the order of the reports, but for its date", async () => {
	const text = async (order: number[]) =>
		// The date of the save is all that may differ.
		readFileSync(join(await save(newRoot(), 3, order), "index.json"), "utf8").replace(/"created": "[^"]*"/, "");
	expect(await text([1, 0])).toEqual(await text([0, 1]));
});

test("files are cut at the size asked for", async () => {
	const saving = NativeSave.begin(newRoot(), 1);
	const report = writeShard(saving.folder, 0, entriesOf(0), { fileBytes: 64 });
	expect(Object.keys(report.files).length).toBe(2);
	saving.abort();
	expect(existsSync(saving.folder)).toBe(false);
});

test("a thread writes snapshots and publishes", async () => {
	const root = newRoot();
	const saving = NativeSave.begin(root, 7);
	const memory = new SharedArrayBuffer(8 + matrix.byteLength);
	new Float32Array(memory, 8).set(matrix);
	using thread = new SaveThread();
	const box = { name: "matrix", dtype: "F32" as const, shape: [6, 8], offsets: [0, 0], sizes: [6, 8] };
	const entries = [{ ...box, memory, byteOffset: 8 }];
	const { path, folder: root_, staged } = openStore(root, null);
	const store = { path, folder: root_, staged };
	const write = { kind: "write" as const, store, folder: saving.folder, iteration: 7, rank: 0, entries };
	thread.start(write);
	expect(thread.busy).toBe(true);
	expect(() => thread.start(write)).toThrow("is busy");
	expect(thread.wait()).toEqual({ failure: null });
	thread.start({
		kind: "publish",
		lock: null,
		store,
		folder: saving.folder,
		iteration: 7,
		ranks: 1,
		description: { generator: "test", model: {}, common: {} },
		retention: {},
	});
	expect(thread.wait()).toEqual({ failure: null });
	using checkpoint = NativeCheckpoint.open(root);
	expect(readTensor(checkpoint, "matrix")).toEqual(matrix);
	expect(readdirSync(checkpoint.path).sort()).toEqual(["data", "index.json"]);
	thread.start({ ...write, folder: join(folder, "nowhere") });
	expect(thread.wait()?.failure).toContain("it does not exist");
});

describe("a save that does not finish", () => {
	test("reports that make no whole tensor are refused and nothing is published", async () => {
		const root = newRoot();
		await save(root, 1);
		const saving = NativeSave.begin(root, 2);
		const reports = [writeShard(saving.folder, 0, entriesOf(0))];
		await expect(saving.publish(reports, description)).rejects.toThrow("has chunks for 24 of 48 elements");
		const twice = [...reports, ...reports];
		await expect(saving.publish(twice, description)).rejects.toThrow("has overlapping chunks at [0,0] and [0,0]");
		saving.abort();
		using checkpoint = NativeCheckpoint.open(root);
		expect(checkpoint.manifest.iteration).toBe(1);
	});

	test("killed at any point: the previous checkpoint is read, and unfinished files are removed", async () => {
		const root = newRoot();
		await save(root, 1);
		const first = NativeSave.begin(root, 2);
		writeShard(first.folder, 0, entriesOf(0));
		expect(NativeCheckpoint.open(root).manifest.iteration).toBe(1);
		expect(readdirSync(root).length).toBe(3);
		// Renamed, but `latest` not yet written.
		const latest = readFileSync(join(root, "latest.json"));
		await save(root, 2);
		writeFileSync(join(root, "latest.json"), latest);
		expect(NativeCheckpoint.open(root).manifest.iteration).toBe(1);
		expect(readdirSync(root).sort()).toEqual(["iter_0000001", "iter_0000002", "latest.json"]);
	});

	test("killed before the first `latest`: the newest whole checkpoint is read, with a notice", async () => {
		const root = newRoot();
		for (const iteration of [null, 9, 10]) await save(root, iteration);
		rmSync(join(root, "latest.json"));
		expect(isCheckpoint(root)).toBeTrue();
		const newest = () => NativeCheckpoint.open(root);
		expect([newest().path, newest().notice]).toEqual([
			join(root, "iter_0000010"),
			`${root} has no latest.json, as after a run that was killed during its first save: taking ${join(root, "iter_0000010")}, its newest checkpoint.`,
		]);
		truncateSync(join(root, "iter_0000010/data/r00000-000.safetensors"), 40);
		expect(newest).toThrow(`The newest good checkpoint is ${join(root, "iter_0000009")} (--allow-fallback takes it).`);
		for (const name of ["iter_0000009", "iter_0000010"]) rmSync(join(root, name), { recursive: true });
		expect(newest().path).toBe(join(root, "release"));
		// Killed again, while that one was replaced.
		renameSync(join(root, "release"), join(root, "release.tmp-abc-old"));
		expect(newest().path).toBe(join(root, "release.tmp-abc-old"));
		NativeSave.begin(root, 1).abort();
		expect(newest().path).toBe(join(root, "release"));
		rmSync(join(root, "release"), { recursive: true });
		expect(isCheckpoint(root)).toBeFalse();
		expect(newest).toThrow(`${root} is not a checkpoint: it has neither latest.json nor index.json.`);
	});

	test("killed while a checkpoint of the same iteration was replaced", async () => {
		const root = newRoot();
		await save(root, 1);
		cpSync(join(root, "iter_0000001"), join(root, "iter_0000001.tmp-abc-old"), { recursive: true });
		rmSync(join(root, "iter_0000001"), { recursive: true });
		expect(NativeCheckpoint.open(root).path).toBe(join(root, "iter_0000001.tmp-abc-old"));
		NativeSave.begin(root, 1).abort();
		expect(NativeCheckpoint.open(root).path).toBe(join(root, "iter_0000001"));
		await save(root, 1);
		expect(readdirSync(root).sort()).toEqual(["iter_0000001", "latest.json"]);
	});
});

describe("damage is named", () => {
	const damaged = async (change: (checkpoint: string, root: string) => void): Promise<string> => {
		const root = newRoot();
		await save(root, 1);
		change(await save(root, 2), root);
		return root;
	};
	const cases: [string, (checkpoint: string, root: string) => void, string][] = [
		[
			"a missing file",
			(path) => rmSync(join(path, "data/r00001-000.safetensors")),
			"r00001-000.safetensors is missing",
		],
		[
			"a short file",
			(path) => truncateSync(join(path, "data/r00000-000.safetensors"), 40),
			"r00000-000.safetensors has 40 of",
		],
		["a missing index", (path) => rmSync(join(path, "index.json")), "index.json: it does not exist"],
		[
			"a short index",
			(path) => truncateSync(join(path, "index.json"), 500),
			"index.json is damaged: its checksum is not the one in latest.json",
		],
		["an altered index", (path) => flip(join(path, "index.json"), 9), "index.json is damaged"],
		["an empty latest.json", (_, root) => truncateSync(join(root, "latest.json"), 0), "latest.json is damaged"],
		["a missing folder", (path) => rmSync(path, { recursive: true }), "it does not exist"],
	];
	for (const [what, change, sentence] of cases) {
		test(what, async () => {
			const root = await damaged(change);
			expect(() => NativeCheckpoint.open(root)).toThrow(sentence);
			expect(() => NativeCheckpoint.open(root)).toThrow("--allow-fallback takes it");
			using fallback = NativeCheckpoint.open(root, { allowFallback: true });
			expect(fallback.notice).toContain(sentence);
			expect(fallback.manifest.iteration).toBe(what === "an empty latest.json" ? 2 : 1);
		});
	}

	test("an altered value, header or object", async () => {
		const root = newRoot();
		const path = await save(root, 1);
		const file = join(path, "data/r00001-000.safetensors");
		flip(file, readFileSync(file).length - 1);
		using checkpoint = NativeCheckpoint.open(root);
		expect(() => checkpoint.verify()).toThrow(`${file} is damaged: the checksum of tensor matrix differs`);
		const other = await save(newRoot(), 1);
		const header = join(other, "data/r00000-000.safetensors");
		flip(header, 12);
		expect(() => NativeCheckpoint.open(other).verify()).toThrow(header);
		const third = await save(newRoot(), 1);
		const objects = join(third, "objects.safetensors");
		flip(objects, readFileSync(objects).length - 1);
		expect(() => NativeCheckpoint.open(third).readObject("rng/0")).toThrow("object rng/0 is damaged");
	});

	test("a folder without a good checkpoint, or without any", async () => {
		const root = newRoot();
		truncateSync(join(await save(root, 1), "data/r00000-000.safetensors"), 40);
		expect(() => NativeCheckpoint.open(root, { allowFallback: true })).toThrow("There is no other good checkpoint");
		expect(() => NativeCheckpoint.open(folder)).toThrow("is not a checkpoint");
		expect(() => NativeCheckpoint.open(join(folder, "none"))).toThrow("it does not exist");
	});
});

test("retention never deletes the newest", async () => {
	const root = newRoot();
	const left = () =>
		readdirSync(root)
			.filter((name) => name.startsWith("iter_"))
			.sort();
	const store = openStore(root, null);
	for (const iteration of [10, 20, 25, 30]) await save(root, iteration);
	expect(await applyRetention(store, {})).toEqual([]);
	expect(await applyRetention(store, { keep: 3 })).toEqual(["iter_0000010"]);
	expect(await applyRetention(store, { retainInterval: 20 })).toEqual(["iter_0000025"]);
	expect(left()).toEqual(["iter_0000020", "iter_0000030"]);
	expect(await applyRetention(store, { keep: 1, retainInterval: 7 })).toEqual(["iter_0000020"]);
	expect(left()).toEqual(["iter_0000030"]);
});
