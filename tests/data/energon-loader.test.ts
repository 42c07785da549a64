import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defaultLoadOptions } from "../../src/data/energon/dataset.ts";
import { defaultLoaderConfiguration, type LoaderConfiguration } from "../../src/data/energon/loader/configuration.ts";
import { DataLoader } from "../../src/data/energon/loader/loader.ts";
import { decodeState, encodeState, type LoaderState } from "../../src/data/energon/loader/state.ts";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import type { Keyed, Sample } from "../../src/data/energon/sample.ts";
import { LocalStorage } from "../../src/data/energon/storage/open.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { captions, png, Scratch, tar } from "./fixtures.ts";
import { LocalLoader } from "./local-loader.ts";

const storage = new LocalStorage();
let images: Images;
let folder: Scratch;
const paths: Record<string, string> = {};
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
	folder = new Scratch();
	paths.a = captions(folder, "a", [7, 5, 9, 4], "2,1,1");
	paths.b = captions(folder, "b", [6, 8]);
	const reference = (name: string, rest: string) => `      - path: ${name}\n        ${rest}\n`;
	const metadataset = (kind: string, items: string) =>
		`__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    ${kind}:\n${items}`;
	const file = (name: string, text: string) => {
		paths[name] = folder.file(`${name}.yaml`, text);
	};
	file("blend", metadataset("blend", reference("a", "weight: 3") + reference("b", "weight: 1")));
	file(
		"epochized",
		metadataset("blend_epochized", reference("a", "repetitions: 2") + reference("b", "repetitions: 0.5")),
	);
	const joiner = "    joiner:\n      __module__: megatron.energon\n      __class__: CaptioningSample\n";
	file("joined", metadataset("join", reference("a", "nonmatch: error") + reference("a", "nonmatch: skip") + joiner));
	prepare(paths.joined!, defaultPrepareOptions);
});
afterAll(() => folder[Symbol.dispose]());

function configuration(path: string, changes: Partial<LoaderConfiguration> = {}): LoaderConfiguration {
	return { ...defaultLoaderConfiguration, task: { kind: "raw" }, path: paths[path]!, ...changes };
}

const identify = (item: Keyed) => JSON.stringify(item.restoreKey);

function local(config: LoaderConfiguration, state?: LoaderState): LocalLoader {
	return new LocalLoader(config, storage, images, state === undefined ? {} : { state });
}

/** Restore keys of the next outputs; "end" at the end of a pass. */
function take(loader: LocalLoader, count: number): string[] {
	return Array.from({ length: count }, () => {
		const output = loader.next();
		return output === null ? "end" : identify(output.item);
	});
}

async function takeFrom(loader: DataLoader, count: number): Promise<string[]> {
	const keys: string[] = [];
	while (keys.length < count) {
		const output = await loader.next();
		keys.push(output === null ? "end" : identify(output.item));
	}
	return keys;
}

/** Message of a promise's rejection. */
async function rejection(promise: Promise<unknown>): Promise<string> {
	try {
		await promise;
	} catch (error) {
		return (error as Error).message;
	}
	return "it was not rejected";
}

const cases: readonly (readonly [string, string, Partial<LoaderConfiguration>])[] = [
	["plain", "a", {}],
	["one worker in place", "a", { numWorkers: 0 }],
	["blend with a shuffle buffer", "blend", { shuffleBufferSize: 5, numWorkers: 3, seedOffset: 7 }],
	["epochized blend, batches", "epochized", { batchSize: 3 }],
	["finite passes of unequal workers", "a", { repeat: false, batchSize: 4, numWorkers: 3 }],
	["a join with a shuffle buffer", "joined", { shuffleBufferSize: 5 }],
	["virtual epochs", "b", { virtualEpochLength: 5, shuffleBufferSize: 3 }],
	[
		"small slices over two epochs",
		"b",
		{
			load: { ...defaultLoadOptions, shuffleOverEpochsMultiplier: 2, maxSamplesPerSequence: 3, parallelShardIters: 2 },
		},
	],
	[
		"validation with a limit",
		"a",
		{ load: { ...defaultLoadOptions, training: false, splitPart: "train" }, limit: 5, numWorkers: 2 },
	],
];

describe("a restored loader continues exactly, from every output", () => {
	for (const [name, path, changes] of cases) {
		test(name, () => {
			const config = configuration(path, changes);
			const whole = take(local(config), 60);
			const running = local(config);
			for (let k = 0; k < 40; k++) {
				const state = decodeState(encodeState(running.save()));
				expect(take(local(config, state), 20)).toEqual(whole.slice(k, k + 20));
				expect(take(running, 1)).toEqual([whole[k]!]);
			}
		});
	}
});

describe("threads deliver the same outputs in the same order", () => {
	for (const [name, path, changes] of cases.slice(1)) {
		test(name, async () => {
			const config = configuration(path, changes);
			const expected = take(local(config), 50);
			await using loader = await DataLoader.open(config, { threads: 2 });
			expect(await takeFrom(loader, 20)).toEqual(expected.slice(0, 20));
			const state = await loader.save();
			expect(await takeFrom(loader, 30)).toEqual(expected.slice(20));
			await using restored = await DataLoader.open(config, {
				state: decodeState(encodeState(state)),
				prefetch: 4,
				threads: 1,
			});
			expect(await takeFrom(restored, 30)).toEqual(expected.slice(20));
		});
	}
});

test("waiting outputs stay within the memory given", async () => {
	await using loader = await DataLoader.open(configuration("blend", { batchSize: 8 }), {
		memoryBytes: 20_000,
		prefetch: 50,
	});
	let most = 0;
	for (let i = 0; i < 40; i++) {
		await loader.next();
		await Bun.sleep(1);
		most = Math.max(most, loader.waitingBytes);
	}
	expect(most).toBeLessThan(40_000);
	expect(most).toBeGreaterThan(1000);
});

test("a worker that stalls the consumer is named", async () => {
	const stalls: [number, number][] = [];
	await using loader = await DataLoader.open(configuration("blend", { rank: 1, worldSize: 2 }), {
		stallSeconds: 0,
		onStall: (rank, worker) => stalls.push([rank, worker]),
	});
	await loader.next();
	expect(stalls[0]).toEqual([1, 0]);
});

describe("failures", () => {
	/** A copy of set a with broken files. */
	function broken(name: string, breakIt: (path: string) => void): string {
		const path = captions(folder, name, [5, 5, 5]);
		breakIt(path);
		paths[name] = path;
		return path;
	}

	test("a damaged image is skipped and listed; other samples keep their order", async () => {
		broken("d", (path) => {
			const tar = join(path, "d-001.tar");
			const bytes = readFileSync(tar);
			const at = bytes.indexOf("IDAT");
			bytes.fill(0xee, at + 4, at + 20);
			writeFileSync(tar, bytes);
		});
		const log = join(folder.path, "skipped.jsonl");
		const config = configuration("d", { task: { kind: "decoded" }, repeat: false, numWorkers: 1 });
		const whole = take(local({ ...config, task: { kind: "raw" } }), 16).map((key) => key.match(/\d+\]$/)?.[0]);
		await using loader = await DataLoader.open(config, { skippedFile: log });
		const keys: (string | undefined)[] = [];
		for (let output = await loader.next(); output !== null; output = await loader.next()) {
			keys.push(identify(output.item).match(/\d+\]$/)?.[0]);
		}
		expect(loader.skipped).toBe(1);
		expect(keys).toEqual(whole.filter((index) => index !== undefined && index !== "5]"));
		const lines = (await Bun.file(log).text()).trim().split("\n");
		const skipped = lines.map((line) => JSON.parse(line));
		expect(skipped).toHaveLength(1);
		expect(skipped[0].samples).toEqual([{ dataset: paths.d, shard: "d-001.tar", key: "d000005" }]);
		expect(skipped[0].reason).toContain("the part png cannot be decoded");
		// A list that cannot be written costs no sample.
		const unlisted: string[] = [];
		const onUnlisted = (sentence: string) => unlisted.push(sentence);
		await using other = await DataLoader.open(config, { skippedFile: "/dev/full", onUnlisted });
		let outputs = 0;
		while ((await other.next()) !== null) outputs++;
		expect([other.skipped, outputs]).toEqual([1, keys.length]);
		expect(unlisted).toEqual(["Cannot write /dev/full: no space left on the device."]);
	});

	test("a truncated shard loses only its missing samples", async () => {
		broken("e", (path) => {
			const tar = join(path, "e-002.tar");
			const bytes = readFileSync(tar);
			writeFileSync(tar, bytes.subarray(0, bytes.length - 1024 - 1024 - 100));
		});
		const config = configuration("e", { repeat: false, numWorkers: 1 });
		await using loader = await DataLoader.open(config);
		const keys: string[] = [];
		for (let output = await loader.next(); output !== null; output = await loader.next()) {
			keys.push((output.item as Sample).key);
		}
		expect([keys.length + loader.skipped, loader.skipped]).toEqual([15, 1]);
		await using strict = await DataLoader.open(config, { onFailure: "raise" });
		expect(await rejection(takeFrom(strict, 16))).toContain("e-002.tar is broken at sample 14");
	});

	test("beyond the budget the run ends", async () => {
		broken("f", (path) => writeFileSync(join(path, "f-001.tar"), ""));
		const config = configuration("f", { numWorkers: 1 });
		await using loader = await DataLoader.open(config, { skipBudget: 3 });
		expect(await rejection(takeFrom(loader, 60))).toContain("more than the budget of 3");
	});

	for (const [name, extension] of [
		["g", "tar"],
		["k", "tar.idx"],
	] as const) {
		test(`a shard that cannot be opened ends the run: .${extension}`, async () => {
			const path = captions(folder, name, [2, 2, 2, 2]);
			paths[name] = path;
			const config = configuration(name, { numWorkers: 1 });
			await using loader = await DataLoader.open(config, { skipBudget: 1000, prefetch: 1 });
			// The sample that is read ahead may have opened its shard already, and no other.
			for (const shard of ["000", "001", "002", "003"]) rmSync(join(path, `${name}-${shard}.${extension}`));
			const failure = await rejection(takeFrom(loader, 60));
			expect(failure).toContain(join(path, `${name}-00`));
			expect(failure).toContain(`.${extension} cannot be opened: it does not exist`);
			expect(loader.skipped).toBe(0);
		});
	}

	test("a hundred broken samples in a row end the run", () => {
		const path = captions(folder, "h", [150]);
		paths.h = path;
		writeFileSync(join(path, "h-000.tar"), Buffer.alloc(1 << 20));
		let skipped = 0;
		const config = configuration("h", { numWorkers: 1 });
		const loader = new LocalLoader(config, storage, images, { errorHandler: () => skipped++ });
		expect(() => loader.next()).toThrow("failed 100 times in a row");
		expect(skipped).toBe(100);
	});

	test("changed data with equal names and counts are refused", async () => {
		paths.i = captions(folder, "i", [3, 3]);
		const state = local(configuration("i")).save();
		const longer = tar(
			[..."xyz"].flatMap(
				(key) =>
					[
						[`i${key}.png`, png(9, 9)],
						[`i${key}.txt`, "a".repeat(900)],
					] as const,
			),
		);
		rmSync(join(paths.i, ".nv-meta"), { recursive: true });
		writeFileSync(join(paths.i, "i-001.tar"), longer);
		const options = { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CaptioningSample" };
		prepare(paths.i, { ...options, fieldMap: '{"image": "png", "caption": "txt"}' });
		expect(await rejection(DataLoader.open(configuration("i"), { state }))).toContain("contents of the shards");
	});

	test("a state of other settings is refused by name", async () => {
		const state = local(configuration("blend")).save();
		const other = DataLoader.open(configuration("blend", { shuffleBufferSize: 9 }), { state });
		expect(await rejection(other)).toContain("saved with shuffleBufferSize = null, this run has 9");
		const data = DataLoader.open(configuration("a"), { state });
		expect(await rejection(data)).toContain("shards and weights");
		const workers = DataLoader.open(configuration("blend", { numWorkers: 3 }), { state });
		expect(await rejection(workers)).toContain("rank 0 with 2 workers; this is rank 0 with 3");
	});

	test("a missing data set is refused before threads start", async () => {
		const config = { ...configuration("a"), path: join(folder.path, "nowhere") };
		expect(await rejection(DataLoader.open(config))).toContain("nowhere does not exist");
	});

	test("a damaged state is refused", () => {
		const bytes = encodeState(local(configuration("a")).save());
		for (const damaged of [new Uint8Array(0), bytes.subarray(0, 50), Bun.zstdCompressSync(Buffer.from("{}"))]) {
			expect(() => decodeState(damaged)).toThrow(/^The (loader state|file) /);
		}
		const json = { format: "mimo data loader", version: 1, settings: {}, rank: 0, worldSize: 1, numWorkers: 1 };
		const text = JSON.stringify({ ...json, nextWorker: 0, ended: [false], workers: [null] });
		const message = "the position of worker 0 cannot be read";
		expect(() => decodeState(Bun.zstdCompressSync(Buffer.from(text)))).toThrow(message);
		const deep = `{"format":"mimo data loader","version":${"[".repeat(20_000)}${"]".repeat(20_000)}}`;
		expect(() => decodeState(Bun.zstdCompressSync(Buffer.from(deep)))).toThrow("its version is not a number");
	});
});
