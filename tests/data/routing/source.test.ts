/** Ranks of disjoint grids read the same lanes: lane by lane or from one pool, dealt out and merged, stopped and resumed. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import {
	defaultLoaderConfiguration,
	type LoaderConfiguration,
} from "../../../src/data/energon/loader/configuration.ts";
import type { Share } from "../../../src/data/routing/image-share.ts";
import { EnergonSource, mergeStates, type Routing, type SourceState } from "../../../src/data/routing/source.ts";
import type { ImageTextBatch } from "../../../src/data/vision-language/batch.ts";
import { captions, joinLanes, Scratch } from "../fixtures.ts";
import { smallTask } from "../vision-language/task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
let configuration: LoaderConfiguration;
beforeAll(() => {
	configuration = {
		...defaultLoaderConfiguration,
		path: captions(scratch, "routed", [17, 9, 23, 14]),
		task: smallTask,
		numWorkers: 2,
		batchSize: 2,
		packingBufferSize: 5,
		shuffleBufferSize: 4,
	};
});

interface Reader {
	readonly lanes: readonly number[];
	readonly keep?: "both" | "text" | "images";
	readonly path?: string;
	readonly textLanes?: readonly number[];
	readonly share?: Share;
	readonly turn?: Share;
	readonly routing?: Routing;
	readonly ranks?: number;
	readonly workers?: number;
	readonly state?: SourceState;
}

function open({ path, keep = "both", share, routing = "lane", ranks = 4, workers = 2, state, ...rest }: Reader) {
	const task = { ...smallTask, keep, ...(share ? { share } : {}) };
	const own = { ...configuration, ...(path ? { path } : {}), task, worldSize: ranks, numWorkers: workers };
	return EnergonSource.open({ configuration: own, routing, loader: { threads: 1 }, state: state ?? null, ...rest });
}

async function one(source: EnergonSource): Promise<ImageTextBatch> {
	return joinLanes(await source.next());
}

async function take(source: EnergonSource, count: number): Promise<ImageTextBatch[]> {
	const batches: ImageTextBatch[] = [];
	while (batches.length < count) batches.push(await one(source));
	return batches;
}

const patches = (batch: ImageTextBatch) => [...batch.images.patches];

for (const routing of ["lane", "routed"] as const) {
	test(`an encoder rank sees the images of its lanes, in lane order: ${routing}`, async () => {
		await using encoder = await open({ lanes: [2, 3], keep: "images", routing });
		await using third = await open({ lanes: [2] });
		await using fourth = await open({ lanes: [3] });
		const [merged, a, b] = [await take(encoder, 7), await take(third, 7), await take(fourth, 7)];
		for (const [i, batch] of merged.entries()) {
			expect(batch.names).toEqual([...a[i]!.names, ...b[i]!.names]);
			expect(patches(batch)).toEqual([...patches(a[i]!), ...patches(b[i]!)]);
			expect(batch.images.imagesPerSample).toEqual([...a[i]!.images.imagesPerSample, ...b[i]!.images.imagesPerSample]);
			expect(batch.text.ids.length).toBe(0);
		}
		// Each lane's images are counted, and all have read the same.
		const reports: Int32Array[] = [];
		const collect = (values: Int32Array) => [values, ...reports.splice(0)];
		for (const source of [third, fourth]) {
			source.compare((values) => {
				reports.push(values);
				return [values];
			}, 7);
		}
		const images = (batches: ImageTextBatch[]) => batches.reduce((sum, { imageCount }) => sum + imageCount, 0);
		expect(encoder.compare(collect, 7)).toEqual({ images: [0, 0, images(a), images(b)], damaged: [] });
	});
}

test("encoder ranks that share a lane encode its packs in equal runs", async () => {
	await using whole = await open({ lanes: [1] });
	await using first = await open({ lanes: [1], keep: "images", share: { index: 0, count: 2 } });
	await using second = await open({ lanes: [1], keep: "images", share: { index: 1, count: 2 } });
	for (let i = 0; i < 4; i++) {
		const [all, a, b] = [await one(whole), await one(first), await one(second)];
		expect([...patches(a), ...patches(b)]).toEqual(patches(all));
		expect([a.images.imagesPerSample.length, b.images.imagesPerSample.length]).toEqual([1, 1]);
		expect(a.imageCount).toBe(all.imageCount);
	}
});

test("where encoder lanes alternate, each reports damage in its own microbatches only", async () => {
	const path = captions(scratch, "turns", [6]);
	const shard = join(path, "turns-000.tar");
	const bytes = readFileSync(shard);
	bytes.fill(0xee, bytes.indexOf("IDAT") + 4, bytes.indexOf("IDAT") + 20);
	writeFileSync(shard, bytes);
	const damaged = async (turn?: Share) => {
		await using source = await open({ path, lanes: [0], ranks: 1, workers: 1, keep: "images", ...(turn && { turn }) });
		await take(source, 12);
		return source.compare((values) => [values], 1).damaged;
	};
	const all = await damaged();
	expect(all.length).toBeGreaterThan(4);
	for (const index of [0, 1, 2]) {
		expect(await damaged({ index, count: 3 })).toEqual(all.filter(({ microbatch }) => microbatch % 3 === index));
	}
});

test("a rank that only trains the language model on a lane decodes no image of it", async () => {
	await using source = await open({ lanes: [1], textLanes: [3] });
	await using whole = await open({ lanes: [3] });
	for (let i = 0; i < 4; i++) {
		const read = await source.next();
		const all = await one(whole);
		const text = read.get(3)!;
		expect([text.names, [...text.text.ids], text.imageCount]).toEqual([all.names, [...all.text.ids], all.imageCount]);
		expect(text.images.patches.length).toBe(0);
		expect(read.get(1)!.images.patches.length).toBeGreaterThan(0);
	}
});

test("no pixel reaches a language rank", async () => {
	await using language = await open({ lanes: [0], keep: "text" });
	await using encoder = await open({ lanes: [0], keep: "images" });
	const batches = await take(language, 5);
	const pixels = (await take(encoder, 5)).reduce((sum, { images }) => sum + images.patches.byteLength, 0);
	expect(batches.every(({ images }) => images.patches.length === 0)).toBe(true);
	expect(pixels).toBeGreaterThan(50_000);
	// Ids, labels and masks of 192 tokens, names, and a kilobyte of counts a batch; two batches wait a worker.
	expect(language.receivedBytes).toBeLessThan((5 + 4) * (3 * 4 * 192 + 2048));
});

describe("resuming", () => {
	const full = process.env.MIMO_TEST_FULL === "1";
	const names = (batches: readonly ImageTextBatch[]) => batches.map((batch) => batch.names);

	test("a state of either routing continues the other exactly, from any microbatch", async () => {
		await using whole = await open({ lanes: [2, 3] });
		const trail = names(await take(whole, 14));
		for (const [routing, other] of [
			["lane", "routed"],
			["routed", "lane"],
		] as const) {
			for (const stop of routing === "lane" ? [3, ...(full ? [0] : [])] : [1, ...(full ? [4] : [])]) {
				await using first = await open({ lanes: [2, 3], routing });
				await using rest = await open({ lanes: [0, 1], routing });
				expect(names(await take(first, stop))).toEqual(trail.slice(0, stop));
				await take(rest, stop);
				const state = mergeStates([await first.save(), await rest.save(), null]);
				const stored = JSON.parse(JSON.stringify(state)) as SourceState;
				await using resumed = await open({ lanes: [2, 3], routing: other, state: stored });
				expect(names(await take(resumed, 7))).toEqual(trail.slice(stop, stop + 7));
			}
		}
	});

	const states = new Map<number, SourceState>();

	/** State of four lanes of two workers each after `count` microbatches each. */
	async function stopped(count: number): Promise<SourceState> {
		const known = states.get(count);
		if (known !== undefined) return known;
		await using source = await open({ lanes: [0, 1, 2, 3], routing: "routed" });
		await take(source, count);
		const state = await source.save();
		states.set(count, state);
		return state;
	}

	test("half as many data ranks with twice the workers continue with the same samples in a round", async () => {
		await using whole = await open({ lanes: [0, 1, 2, 3], routing: "routed" });
		const before = names(await take(whole, 4)).flat();
		const after = names(await take(whole, 6)).flat();
		const state = await stopped(4);
		await using resumed = await open({ lanes: [0, 1], ranks: 2, workers: 4, state });
		// A round of all eight workers is two microbatches of four lanes, or four of two.
		const rest = names(await take(resumed, 12)).flat();
		expect(before.length).toBeGreaterThan(0);
		expect([...rest].sort()).toEqual([...after].sort());
	});

	for (const [what, ranks, workers, count, message] of [
		["another number of workers", 2, 2, 4, "a run of 2 data ranks continues it exactly with num-workers 4"],
		["a number that does not divide", 3, 2, 4, "use a number of data ranks that divides 8"],
		["the middle of a round", 2, 4, 3, "in the middle of a round of the 2 workers"],
	] as const) {
		test(`${what} is refused, with what to do`, async () => {
			const state = await stopped(count);
			await expect(open({ lanes: [0], ranks, workers, state })).rejects.toThrow(message);
		});
	}

	test("a state of some ranks only, or of a later version, is refused", async () => {
		const state = await stopped(1);
		const part = { ...state, lanes: state.lanes.slice(1) };
		await expect(open({ lanes: [0], state: part })).rejects.toThrow("has data ranks 1, 2, 3 of 4; all are needed");
		const damaged = { ...state, lanes: state.lanes.map(({ trail: _, ...lane }) => lane) } as unknown as SourceState;
		await expect(open({ lanes: [0], state: damaged })).rejects.toThrow("is damaged: a lane cannot be read");
		const later = { ...state, version: 2 } as unknown as SourceState;
		await expect(open({ lanes: [0], state: later })).rejects.toThrow("has version 2; this program reads version 1");
	});
});
