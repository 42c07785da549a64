/** Checks `rng/`: seeds, draws of the generators, and how samples are cut up and shuffled. */
import { CryptoHasher } from "bun";
import { defaultLoadOptions, loadDatasets } from "../../../src/data/energon/dataset.ts";
import { raiseError } from "../../../src/data/energon/errors.ts";
import { cumulative, TorchGenerator } from "../../../src/data/energon/random/torch-generator.ts";
import {
	interleaving,
	type Subset,
	shardWorkers,
	splitShard,
	subsetBounds,
} from "../../../src/data/energon/sharder.ts";
import { resolvePath } from "../../../src/data/energon/storage/storage.ts";
import { Worker, type WorkerConfig, workerSeed } from "../../../src/data/energon/worker.ts";
import { UserError } from "../../../src/system/errors.ts";
import { difference, revive } from "./golden.ts";
import type { Setting } from "./setup.ts";

type Values = Readonly<Record<string, unknown>>;

function config(rank: number, worldSize: number, numWorkers: number, seedOffset: number): WorkerConfig {
	return { rank, worldSize, numWorkers, seedOffset, errorHandler: raiseError, restoreErrorHandler: raiseError };
}

/** The first difference over a list, with the case's number. */
function eachCase<Case>(cases: readonly Case[], check: (entry: Case) => string | null): string | null {
	for (const [i, entry] of cases.entries()) {
		const found = check(entry);
		if (found !== null) return `case ${i}: ${found}`;
	}
	return null;
}

type SeedRow = [
	seedOffset: number,
	world: number,
	workers: number,
	rank: number,
	worker: number,
	id: number,
	seed: number,
];

export function checkSeeds(file: {
	readonly rule_check: { readonly text: string; readonly last_4_bytes_big_endian: number };
	readonly rows: readonly SeedRow[];
}): string | null {
	const [id, offset] = file.rule_check.text.split(",").map(Number) as [number, number];
	return (
		difference(workerSeed(id, offset), file.rule_check.last_4_bytes_big_endian, `seed of ${file.rule_check.text}`) ??
		eachCase(file.rows, ([seedOffset, world, workers, rank, local, globalId, seed]) => {
			const worker = new Worker(config(rank, world, workers, seedOffset), local);
			return difference([worker.globalId, worker.seed()], [globalId, seed], "global id and seed");
		})
	);
}

export function checkInWorkers(file: { readonly cases: readonly Values[] }): string | null {
	return eachCase(file.cases, (entry) => {
		const { seed_offset: offset, world_size: world, num_workers: workers, rank } = entry as Record<string, number>;
		return eachCase(entry.workers as readonly Values[], (expected) => {
			const worker = new Worker(config(rank!, world!, workers!, offset!), expected.rank_worker_id as number);
			return eachCase(Object.entries(expected), ([name, value]) => {
				if (name === "rank_worker_id") return null;
				if (name === "global_worker_id") return difference(worker.globalId, value, name);
				if (name === "worker_seed") return difference(worker.seed(), value, name);
				return drawDifference(name, value, worker.seed(), expected);
			});
		});
	});
}

export function checkWorkerDraws(file: { readonly cases: readonly Values[] }): string | null {
	const given = new Set(["seed_offset", "rank", "num_workers", "worker_seed"]);
	return eachCase(file.cases, (entry) => {
		const { seed_offset: offset, rank, num_workers: workers } = entry as Record<string, number>;
		const seed = new Worker(config(rank!, rank! + 1, workers!, offset!), 0).seed();
		return (
			difference(seed, entry.worker_seed, "worker_seed") ??
			eachCase(Object.entries(entry), ([name, value]) =>
				given.has(name) ? null : drawDifference(name, value, seed, entry),
			)
		);
	});
}

const digest = (generator: TorchGenerator) => new CryptoHasher("sha256").update(generator.state()).digest("hex");

/** Draws of a fresh generator by the name of the list, such as "randbelow(7)". */
function drawDifference(name: string, value: unknown, seed: number, entry: Values): string | null {
	const generator = new TorchGenerator(seed);
	const count = Array.isArray(value) ? value.length : 0;
	const list = <Draw>(draw: () => Draw) => Array.from({ length: count }, draw);
	const bound = /^randbelow\((\d+)\)$/.exec(name);
	if (bound)
		return difference(
			list(() => generator.below(Number(bound[1]))),
			value,
			name,
		);
	if (name === "raw_u32")
		return difference(
			list(() => generator.u32()),
			value,
			name,
		);
	if (name === "torch.rand(1)")
		return difference(
			list(() => generator.unit()),
			value,
			name,
		);
	const shuffled = /^shuffle\(range\((\d+)\)\)/.exec(name);
	if (shuffled)
		return difference(
			list(() => generator.permutation(Number(shuffled[1]))),
			value,
			name,
		);
	if (name.endsWith("float32 cumsum bits")) return null;
	if (name.startsWith("choice_idx(")) {
		const bits = entry[`${name} float32 cumsum bits`] as readonly string[];
		const sums = floats(bits);
		const weights = /^choice_idx\(\[([-+0-9.e,\s]+)\]\)$/.exec(name);
		const own = weights ? cumulative(Float32Array.from(weights[1]!.split(","), Number)) : sums;
		return (
			difference([...own], [...sums], `${name}, cumulative weights`) ??
			difference(
				list(() => generator.choiceByCumulative(sums)),
				value,
				name,
			)
		);
	}
	if (name.startsWith("rand_pop from 10")) {
		const items = Array.from({ length: 10 }, (_, i) => i);
		let next = items.length;
		const drawn = list(() => {
			const [item] = items.splice(generator.below(items.length), 1);
			items.push(next++);
			return item;
		});
		return difference(drawn, value, name);
	}
	if (name.startsWith("mixed ")) return difference(mixedDraws(generator, count / 3), value, name);
	if (name === "state_sha256") {
		const fresh = digest(generator);
		generator.below(10);
		const after = digest(generator);
		const mixed = new TorchGenerator(seed);
		mixedDraws(mixed, 5);
		return difference({ fresh, "after randbelow(10)": after, mixed: digest(mixed) }, value, name);
	}
	if (name === "state_after_mixed") {
		mixedDraws(generator, 5);
		return difference([...generator.state()], [...(revive(value) as Uint8Array)], name);
	}
	if (name.startsWith("after restoring the mixed state: randbelow(1000)")) {
		const mixed = new TorchGenerator(seed);
		mixedDraws(mixed, 5);
		const restored = TorchGenerator.fromState(mixed.state());
		return difference(
			list(() => restored.below(1000)),
			value,
			name,
		);
	}
	throw new UserError(`The reference data have draws named "${name}", which are not known here.`);
}

/** Rounds of randbelow(100), choice_idx([1, 2, 3]), shuffle("abcd"). */
function mixedDraws(generator: TorchGenerator, rounds: number): unknown[] {
	return Array.from({ length: rounds }, () => [
		generator.below(100),
		generator.choiceByCumulative(cumulative(Float32Array.of(1, 2, 3))),
		generator.permutation(4).map((i) => "abcd"[i]),
	]).flat();
}

function floats(bits: readonly string[]): Float32Array {
	const words = Uint32Array.from(bits, (hex) => Number.parseInt(hex, 16));
	return new Float32Array(words.buffer);
}

type SharderRow = [
	shards: string,
	world: number,
	workers: number,
	limit: number | null,
	rotation: number,
	offsets: readonly (readonly (readonly number[])[])[],
];

interface GoldenSubset {
	readonly range?: readonly [number, number];
	readonly absolute_range?: readonly [number, number | null];
}

export function checkSharder(file: {
	readonly shard_counts: Readonly<Record<string, readonly number[]>>;
	readonly rows: readonly SharderRow[];
	readonly subsets: readonly [number, GoldenSubset, readonly number[] | { readonly error: string }][];
	readonly interleaving_permutation: Readonly<Record<string, readonly number[]>>;
}): string | null {
	const rows = eachCase(file.rows, ([name, worldSize, numWorkers, limit, rotation, offsets]) =>
		eachCase(offsets, (expected) => {
			const rank = offsets.indexOf(expected);
			const division = { rank, worldSize, numWorkers, maxSamplesPerSequence: limit, subset: null, rotation };
			return difference(shardWorkers(file.shard_counts[name]!, division), expected, `rank ${rank} of ${name}`);
		}),
	);
	const subsets = eachCase(file.subsets, ([total, { range, absolute_range: absolute }, expected]) => {
		const subset: Subset = { absoluteRange: absolute ?? null, range: range ?? [0, 1] };
		let bounds: unknown;
		try {
			bounds = subsetBounds(total, subset);
		} catch (error) {
			return "error" in expected ? null : (error as Error).message;
		}
		return difference(bounds, expected, "subset");
	});
	const permutations = eachCase(Object.entries(file.interleaving_permutation), ([count, expected]) =>
		difference(interleaving(Array.from({ length: Number(count) }, (_, i) => i)), expected, `permutation of ${count}`),
	);
	return rows ?? subsets ?? permutations;
}

export function checkSplitShard(file: {
	readonly rows: readonly [number, number, number | null, readonly number[]][];
}): string | null {
	return eachCase(file.rows, ([start, end, limit, starts]) =>
		difference(splitShard(start, end, limit), starts, `slices of [${start}, ${end})`),
	);
}

interface SliceOrder {
	readonly dataset: string;
	readonly world_size: number;
	readonly rank: number;
	readonly num_workers: number;
	readonly seed_offset: number;
	readonly max_samples_per_sequence: number | null;
	readonly parallel_shard_iters: number;
	readonly shuffle_over_epochs: number;
	readonly slice_offsets: readonly number[];
	readonly slices_taken_per_epoch: readonly (readonly number[])[];
	readonly first_sample_indexes: readonly number[];
}

export function checkSliceOrders(setting: Setting, file: { readonly cases: readonly SliceOrder[] }): string | null {
	return eachCase(file.cases, (entry) => {
		const { slice_offsets: offsets, shuffle_over_epochs: epochs } = entry;
		const worker = new Worker(config(entry.rank, entry.world_size, entry.num_workers, entry.seed_offset), 0);
		const { datasets } = loadDatasets(
			setting.storage,
			resolvePath(setting.golden, entry.dataset),
			{ images: null },
			{
				...defaultLoadOptions,
				shuffleOverEpochsMultiplier: epochs,
				maxSamplesPerSequence: entry.max_samples_per_sequence,
				parallelShardIters: entry.parallel_shard_iters,
			},
		);
		const { records } = datasets[0]!.build(worker, 0);
		const slices = offsets.length - 1;
		const orders: number[][] = [];
		const drawn: number[] = [];
		while (orders.length < entry.slices_taken_per_epoch.length || drawn.length < entry.first_sample_indexes.length) {
			// The order of an epoch's slices is the first thing drawn in it.
			const { rng } = records.save()._worker_rng as unknown as { rng: { restore(): TorchGenerator } };
			const generator = rng.restore();
			orders.push(
				epochs === -1
					? Array.from({ length: entry.parallel_shard_iters }, () => generator.below(slices))
					: generator.permutation(slices * epochs).map((i) => i % slices),
			);
			for (const { restoreKey } of records.iterate()) {
				drawn.push(restoreKey[1] as number);
				if (epochs === -1 && drawn.length >= entry.first_sample_indexes.length) break;
			}
		}
		const taken = entry.slices_taken_per_epoch;
		return (
			difference(orders.slice(0, taken.length), taken, "slices taken per epoch") ??
			difference(drawn.slice(0, entry.first_sample_indexes.length), entry.first_sample_indexes, "sample indexes")
		);
	});
}
