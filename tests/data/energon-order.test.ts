import { describe, expect, test } from "bun:test";
import { raiseError } from "../../src/data/energon/errors.ts";
import { hook } from "../../src/data/energon/hook.ts";
import { cumulative, TorchGenerator } from "../../src/data/energon/random/torch-generator.ts";
import type { RawRecord } from "../../src/data/energon/sample.ts";
import { interleaving, roundHalfToEven, shardWorkers, splitShard } from "../../src/data/energon/sharder.ts";
import { Worker, workerSeed } from "../../src/data/energon/worker.ts";
import { BlendDataset } from "../../src/data/energon/wrappers/blend.ts";
import { LimitDataset, RepeatDataset } from "../../src/data/energon/wrappers/limit.ts";
import { MapDataset } from "../../src/data/energon/wrappers/map.ts";
import { SampleLoaderDataset } from "../../src/data/energon/wrappers/sample-loader.ts";
import { ShuffleBufferDataset } from "../../src/data/energon/wrappers/shuffle-buffer.ts";

/** The worked examples of docs/spec/energon.md §9. */
const tenShards = [100, 37, 250, 61, 128, 90, 5, 300, 77, 155];

function worker(rank: number, worldSize: number, numWorkers: number, id: number, seedOffset = 0): Worker {
	const config = { rank, worldSize, numWorkers, seedOffset };
	return new Worker({ ...config, errorHandler: raiseError, restoreErrorHandler: raiseError }, id);
}

/** Sample indexes of global worker g of eight (two ranks of four). */
function loader(
	g: number,
	options: {
		parallel?: number;
		shuffle?: number | null;
		seedOffset?: number;
		counts?: number[];
		limit?: number;
		rotation?: number;
	},
): SampleLoaderDataset {
	const one = options.counts?.length === 2;
	const owner = one ? worker(0, 1, 1, 0) : worker(Math.floor(g / 4), 2, 4, g % 4, options.seedOffset);
	const { rank, worldSize, numWorkers } = owner.config;
	const division = { rank, worldSize, numWorkers, subset: null, rotation: options.rotation ?? 0 };
	const limit = options.limit ?? 40;
	const sliceOffsets = shardWorkers(options.counts ?? tenShards, { ...division, maxSamplesPerSequence: limit });
	const reader = {
		read: (index: number) => ({ key: String(index), shard: "", sources: [], parts: new Map<string, Uint8Array>() }),
	};
	return new SampleLoaderDataset(owner, {
		readers: [reader],
		sliceOffsets,
		shuffleOverEpochs: options.shuffle === undefined ? 1 : options.shuffle,
		parallelSlices: options.parallel ?? 16,
	});
}

function first(count: number, dataset: { iterate(): Generator<RawRecord, void, void> }): number[] {
	const drawn: number[] = [];
	while (drawn.length < count) {
		for (const { restoreKey } of dataset.iterate()) {
			if (drawn.length === count) break;
			drawn.push(restoreKey.at(-1) as number);
		}
	}
	return drawn;
}

const numbers = (text: string) => text.split(" ").map(Number);

describe("seeds and draws (docs/spec/energon.md §9.1)", () => {
	for (const [offset, g, seed, draws] of [
		[0, 0, 273211461, "1812855090 3096276510 3867689913 1620833732"],
		[0, 7, 968744797, "2257470282 225694598 4279223854 2696029563"],
		[1234, 3, 3873168430, "2577398724 2125176116 824492550 578186353"],
	] as const) {
		test(`worker ${g}, offset ${offset}`, () => {
			expect(workerSeed(g, offset)).toBe(seed);
			const generator = new TorchGenerator(seed);
			expect(Array.from({ length: 4 }, () => generator.u32())).toEqual(numbers(draws));
		});
	}

	test("unit, permutation, integers", () => {
		const fresh = () => new TorchGenerator(273211461);
		expect(fresh().unit()).toBe(0.05458366870880127);
		expect(fresh().permutation(10)).toEqual([0, 4, 3, 2, 7, 5, 6, 1, 9, 8]);
		const generator = fresh();
		expect(Array.from({ length: 8 }, () => generator.below(7))).toEqual([4, 5, 3, 0, 6, 6, 1, 2]);
	});

	test("a generator continues from a saved state", () => {
		const generator = new TorchGenerator(5);
		for (const draws of [0, 1, 623, 624, 625, 1300]) {
			for (let i = 0; i < draws; i++) generator.u32();
			const copy = TorchGenerator.fromState(generator.state());
			const expected = Array.from({ length: 5 }, () => generator.u32());
			expect(Array.from({ length: 5 }, () => copy.u32())).toEqual(expected);
		}
	});
});

describe("sharding (docs/spec/energon.md §9.2, §9.3)", () => {
	test("interleaving of 12 workers", () => {
		const indices = Array.from({ length: 12 }, (_, i) => i);
		expect(interleaving(indices)).toEqual(numbers("0 6 3 9 1 7 4 10 2 8 5 11"));
	});

	test("ten shards over eight workers do not depend on the number of ranks", () => {
		const expected = [
			"0 50 100 137 151",
			"151 188 226 263 301",
			"301 344 387 417 448 452",
			"452 493 534 576 602",
			"602 634 666 671 712 753",
			"753 790 828 865 903",
			"903 937 971 1009 1048 1053",
			"1053 1090 1128 1165 1203",
		].map(numbers);
		for (const [worldSize, numWorkers] of [
			[1, 8],
			[2, 4],
			[8, 1],
			[8, 0],
		] as const) {
			const slices = Array.from({ length: worldSize }, (_, rank) =>
				shardWorkers(tenShards, { rank, worldSize, numWorkers, maxSamplesPerSequence: 40, subset: null, rotation: 0 }),
			);
			expect(slices.flat()).toEqual(expected);
		}
	});

	test("ties of quotients round to even, steps are truncated", () => {
		expect(splitShard(0, 100, 40)).toEqual([0, 50]);
		expect(splitShard(151, 301, 40)).toEqual([151, 188, 226, 263]);
		expect([0.5, 1.5, 2.5, 2.6].map(roundHalfToEven)).toEqual([0, 2, 2, 3]);
	});
});

describe("order (docs/spec/energon.md §9.4)", () => {
	for (const [g, parallel, expected] of [
		[0, 16, "137 138 50 0 100 1 51 2 3 52 53 4 101 102 5 54 55 56 57 58"],
		[0, 2, "50 51 100 52 101 53 54 55 56 102 57 58 103 104 59 60 61 62 63 105"],
		[1, 16, "263 226 264 227 265 188 189 266 267 190 151 191 192 268 193 152 153 194 269 195"],
		[5, 16, "753 865 866 828 867 829 830 831 790 754 791 868 832 755 756 792 793 757 794 795"],
	] as const) {
		test(`worker ${g}, ${parallel} slices at once`, () => {
			expect(first(20, loader(g, { parallel }))).toEqual(numbers(expected));
		});
	}

	for (const [seedOffset, expected] of [
		[0, "137 138 1 100 102 52 5 53 2 4 56 101 59 6 3 60 55 7 50 54"],
		[1234, "2 50 52 138 54 51 102 100 1 4 103 140 101 56 0 58 5 57 59 55"],
	] as const) {
		test(`shuffle buffer of 10, seed offset ${seedOffset}`, () => {
			const buffered = new ShuffleBufferDataset(loader(0, { seedOffset }), 10);
			expect(first(20, buffered)).toEqual(numbers(expected));
		});
	}

	for (const [shuffle, parallel, expected] of [
		[1, 16, "2 4 5 3 6 0 1 2 4 5 3 0 1 6 2 3 0 4 5 1 6 2 3 0 1 4 5 6"],
		[2, 16, "0 2 2 4 4 5 3 1 5 6 0 1 6 3 2 4 0 3 5 1 0 2 4 1 5 6 6 3"],
		[-1, 3, "0 1 0 0 1 0 1 0 0 1 1 1 0 1 0 4 1 5 0 1 2 0 3 6 1 0 0 1"],
	] as const) {
		test(`two small shards, shuffled over ${shuffle} epochs`, () => {
			expect(first(28, loader(0, { counts: [4, 3], limit: 2, shuffle, parallel }))).toEqual(numbers(expected));
		});
	}

	test("a blend of two leaves", () => {
		const owner = worker(0, 2, 4, 0);
		const a = loader(0, {});
		const b = new SampleLoaderDataset(owner, {
			readers: [{ read: (i) => ({ key: `b${i}`, shard: "", sources: [], parts: new Map() }) }],
			sliceOffsets: shardWorkers([40, 40, 41], {
				rank: 0,
				worldSize: 2,
				numWorkers: 4,
				maxSamplesPerSequence: 40,
				subset: null,
				rotation: 1203 % 8,
			}),
			shuffleOverEpochs: 1,
			parallelSlices: 16,
		});
		const blend = new BlendDataset(owner, [new RepeatDataset(a, null), new RepeatDataset(b, null)], [0.75, 0.25]);
		const drawn: string[] = [];
		for (const { restoreKey } of blend.iterate()) {
			drawn.push(`${"ab"[restoreKey[1] as number]}${restoreKey.at(-1)}`);
			if (drawn.length === 20) break;
		}
		const expected = "a137 a138 a50 a0 a100 a1 b0 a51 b1 a2 b2 b3 a3 a52 b4 a53 a4 b5 a101 a102";
		expect(drawn).toEqual(expected.split(" "));
	});

	test("a limited pass computes one output more than it returns", () => {
		const owner = worker(0, 1, 1, 0);
		const made: number[] = [];
		const source = new MapDataset(
			loader(0, { counts: [4, 3], limit: 10, shuffle: null, parallel: 1 }),
			hook("note", (record: RawRecord) => {
				made.push(record.restoreKey.at(-1) as number);
				return record;
			}),
		);
		const limited = new LimitDataset(source, 3);
		for (let pass = 0; pass < 2; pass++) expect([...limited.iterate()]).toHaveLength(3);
		expect(made).toEqual([0, 1, 2, 3, 0, 1, 2, 3]);
		expect(owner.config.numWorkers).toBe(1);
	});

	test("weights accumulate in double and round to float32 (docs/spec/energon.md §9.5)", () => {
		const sums = cumulative(Float32Array.of(0.4, 0.4, 0.1, 0.1));
		const bits = [...new Uint32Array(sums.buffer)].map((word) => word.toString(16));
		expect(bits).toEqual(["3ecccccd", "3f4ccccd", "3f666667", "3f800000"]);
	});
});
