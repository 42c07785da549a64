/** The whole way from shards to microbatches. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defaultLoadOptions } from "../../../src/data/energon/dataset.ts";
import {
	defaultLoaderConfiguration,
	type LoaderConfiguration,
} from "../../../src/data/energon/loader/configuration.ts";
import { DataLoader } from "../../../src/data/energon/loader/loader.ts";
import { decodeState, encodeState } from "../../../src/data/energon/loader/state.ts";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import type { ImageTextBatch } from "../../../src/data/vision-language/batch.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { captions, Scratch } from "../fixtures.ts";
import { LocalLoader } from "../local-loader.ts";
import { smallTask } from "./task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
let images: Images;
let configuration: LoaderConfiguration;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
	configuration = {
		...defaultLoaderConfiguration,
		path: captions(scratch, "pictures", [9, 14, 11]),
		task: smallTask,
		numWorkers: 2,
		batchSize: 2,
		packingBufferSize: 6,
		shuffleBufferSize: 5,
		seedOffset: 3,
	};
});

const open = (changed: Partial<LoaderConfiguration> = {}, state?: Uint8Array) =>
	new LocalLoader(
		{ ...configuration, ...changed },
		new LocalStorage(),
		images,
		state ? { state: decodeState(state) } : {},
	);

function take(loader: LocalLoader, count: number): ImageTextBatch[] {
	return Array.from({ length: count }, () => loader.next()!.item as ImageTextBatch);
}

/** Everything of a batch, as text. */
const digest = (batch: ImageTextBatch) => Bun.hash(Bun.inspect(batch, { depth: 9 }) + batch.images.patches.join());

test("a batch has as many image tokens as its images have rows, and is as long as its packs", () => {
	for (const { text, images, names } of take(open(), 12)) {
		expect(text.ids.length).toBe(2 * 96);
		expect(text.lengths.reduce((a, b) => a + b)).toBe(2 * 96);
		const patches = images.grids.map(({ rows, columns }) => rows * columns);
		const rows = patches.reduce((sum, count) => sum + count / 4, 0);
		expect(text.ids.filter((id) => id === 300).length).toBe(rows);
		expect(images.patches.length).toBe(rows * 4 * 768);
		expect(images.imagesPerSample.reduce((a, b) => a + b)).toBe(names.length);
		expect(images.imagesPerSample.length).toBe(2);
		expect(text.samples).toEqual([96, 96]);
	}
});

const packings = [
	{ packing: "carry-over" },
	{ packing: "greedy" },
	{ packing: "equal-work", imageWork: [1, 9, 20], mostPatches: 150 },
] as const;

for (const own of packings) {
	test(`every tensor continues exactly from a state taken anywhere, packs and buffers half full: ${JSON.stringify(own)}`, () => {
		const changed = { task: { ...smallTask, ...own } };
		const whole = take(open(changed), 24).map(digest);
		const loader = open(changed);
		for (let taken = 0; taken < 12; taken++) {
			const state = encodeState(loader.save());
			expect(take(open(changed, state), 6).map(digest)).toEqual(whole.slice(taken, taken + 6));
			take(loader, 1);
		}
	});
}

test("packs of equal work follow the work of their images, and packs stay within a bound of patches", () => {
	const weighed = { task: { ...smallTask, packing: "equal-work", imageWork: [1, 9, 20] } } as const;
	const digests = (loader: LocalLoader) => take(loader, 8).map(digest);
	expect(digests(open(weighed))).not.toEqual(digests(open()));
	const bounded = { task: { ...smallTask, mostPatches: 100 } };
	for (const { images: of } of take(open({ ...bounded, batchSize: 1 }), 16)) {
		expect(of.grids.reduce((sum, { rows, columns }) => sum + rows * columns, 0)).toBeLessThanOrEqual(100);
	}
	expect(() => open(bounded, encodeState(open().save()))).toThrow("saved with task");
});

test("a finite pass packs every sample once, also carried-over samples", () => {
	const once = { load: { ...defaultLoadOptions, training: false }, batchSize: 1, shuffleBufferSize: null };
	for (const packing of ["carry-over", "greedy"] as const) {
		const loader = open({ ...once, task: { ...smallTask, packing } });
		const names: string[] = [];
		for (let output = loader.next(); output !== null; output = loader.next()) {
			names.push(...(output.item as ImageTextBatch).names);
		}
		expect(names.length).toBe(34);
		expect(new Set(names).size).toBe(34);
	}
});

test("threads deliver the same batches, and tokens alone or pixels alone are those of both", async () => {
	const both = take(open(), 6);
	await using loader = await DataLoader.open(configuration, { threads: 2 });
	for (const batch of both) expect(digest((await loader.next())!.item as ImageTextBatch)).toBe(digest(batch));
	const text = take(open({ task: { ...smallTask, keep: "text" } }), 6);
	const pixels = take(open({ task: { ...smallTask, keep: "images" } }), 6);
	expect(text.map((batch) => [...batch.text.labels])).toEqual(both.map((batch) => [...batch.text.labels]));
	expect(text.every((batch) => batch.images.patches.length === 0)).toBe(true);
	expect(pixels.map((batch) => [...batch.images.patches])).toEqual(both.map((batch) => [...batch.images.patches]));
	expect(pixels.every((batch) => batch.text.ids.length === 0)).toBe(true);
});

/** Counts files that are decoded. */
class CountingImages extends Images {
	decoded = 0;

	override decode(...args: Parameters<Images["decode"]>) {
		this.decoded++;
		return super.decode(...args);
	}

	override decodeResized(...args: Parameters<Images["decodeResized"]>) {
		this.decoded++;
		return super.decodeResized(...args);
	}
}

test("a rank decodes only the images that it needs: none for text, its share of a shared lane", async () => {
	const read = async (changed: Partial<typeof smallTask>) => {
		const counting = new CountingImages(await openLibrary("cpu"));
		const task = { ...smallTask, ...changed };
		const loader = new LocalLoader({ ...configuration, task }, new LocalStorage(), counting, {});
		const batches = take(loader, 10);
		return { decoded: counting.decoded, batches };
	};
	const both = await read({});
	const all = both.batches.reduce((sum, { imageCount }) => sum + imageCount, 0);
	expect(all).toBeGreaterThan(40);
	expect(both.decoded).toBe(all);
	expect((await read({ keep: "text" })).decoded).toBe(0);
	expect((await read({ keep: "images" })).decoded).toBe(all);
	const halves = [0, 1].map((index) => read({ keep: "images", share: { index, count: 2 } }));
	const [first, second] = (await Promise.all(halves)) as [typeof both, typeof both];
	for (const half of [first, second]) {
		expect(half.decoded).toBe(half.batches.reduce((sum, { images: own }) => sum + own.grids.length, 0));
	}
	expect(first.decoded + second.decoded).toBe(all);
});

test("a damaged image has black pixels, moves no other sample on any rank, and is named", () => {
	const folder = captions(scratch, "broken", [9, 8]);
	const whole = { ...configuration, path: folder, packingBufferSize: null, shuffleBufferSize: null };
	const before = take(open(whole), 12);
	const shard = join(folder, "broken-000.tar");
	const bytes = readFileSync(shard);
	bytes.fill(0xee, bytes.indexOf("IDAT") + 4, bytes.indexOf("IDAT") + 20);
	writeFileSync(shard, bytes);
	for (const keep of ["both", "text", "images"] as const) {
		const after = take(open({ ...whole, task: { ...smallTask, keep } }), 12);
		expect(after.map(({ names }) => names)).toEqual(before.map(({ names }) => names));
		if (keep !== "images")
			expect(after.map(({ text }) => [...text.ids])).toEqual(before.map(({ text }) => [...text.ids]));
		const damaged = after.flatMap((batch) => batch.damaged.map((one) => ({ ...one, name: batch.names[one.sample] })));
		expect(damaged.length > 0).toBe(keep !== "text");
		for (const { name, reason, sources } of damaged) {
			expect(name).toEndWith("broken-000.tar/broken000000");
			expect(reason).toContain("broken000000: the image is damaged");
			expect(sources).toEqual([{ dataset: folder, shard: "broken-000.tar", key: "broken000000" }]);
		}
	}
});
