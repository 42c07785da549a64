/**
 * Divides samples among workers, in slices (docs/spec/energon.md §3.1). A worker's slices are offsets of sample indices in the
 * split part: slice i is [offsets[i], offsets[i + 1]); a single offset means no samples.
 */
import { UserError } from "../../system/errors.ts";

/** A subset of a dataset: absolute bounds, then fractions of the samples between them. */
export interface Subset {
	readonly absoluteRange: readonly [number, number | null] | null;
	readonly range: readonly [number, number];
}

/** [start, end) of a subset of `total` samples. Throws a UserError for bounds beyond them. */
export function subsetBounds(total: number, subset: Subset | null): [number, number] {
	let start = 0;
	let end = total;
	if (subset === null) return [start, end];
	if (subset.absoluteRange !== null) {
		start = subset.absoluteRange[0];
		end = subset.absoluteRange[1] ?? total;
		if (end > total) throw new UserError(`A subset ends at sample ${end}, but there are only ${total}.`);
		if (start > end) throw new UserError(`A subset starts at sample ${start}, after its end ${end}.`);
		if (start < 0) throw new UserError(`A subset starts at sample ${start}, which is below 0.`);
	}
	const size = end - start;
	const first = start + Math.trunc(size * subset.range[0]);
	const last = start + Math.trunc(size * subset.range[1]);
	if (first > last) throw new UserError(`A subset goes from ${subset.range[0]} back to ${subset.range[1]}.`);
	return [first, last];
}

/** Order in which workers receive the remaining samples: halves interleaved, recursively. */
export function interleaving(indices: readonly number[]): number[] {
	if (indices.length <= 2) return [...indices];
	const half = Math.floor(indices.length / 2);
	const left = interleaving(indices.slice(0, half));
	const right = interleaving(indices.slice(half));
	const merged: number[] = [];
	for (let i = 0; i < right.length; i++) {
		if (i < left.length) merged.push(left[i]!);
		merged.push(right[i]!);
	}
	return merged;
}

/** Starts of the slices of [start, end), of about `limit` samples each. */
export function splitShard(start: number, end: number, limit: number | null): number[] {
	const size = end - start;
	if (limit === null || size <= limit * 1.5) return [start];
	const count = Math.max(roundHalfToEven(size / limit), 1);
	const step = size / count;
	return Array.from({ length: count }, (_, i) => start + Math.trunc(i * step));
}

export function roundHalfToEven(x: number): number {
	const below = Math.floor(x);
	const rest = x - below;
	if (rest !== 0.5) return rest < 0.5 ? below : below + 1;
	return below % 2 === 0 ? below : below + 1;
}

export interface Division {
	/** Data-parallel rank and size. */
	readonly rank: number;
	readonly worldSize: number;
	/** Logical workers of a rank; 0 counts as 1. */
	readonly numWorkers: number;
	readonly maxSamplesPerSequence: number | null;
	readonly subset: Subset | null;
	/** Rotates the workers that receive the remaining samples: number of samples of earlier datasets, modulo the workers. */
	readonly rotation: number;
}

/** Bounds of the rank's workers: worker w owns [bounds[w], bounds[w + 1]). */
function workerBounds(start: number, end: number, division: Division): number[] {
	const perRank = Math.max(1, division.numWorkers);
	const workers = perRank * division.worldSize;
	const total = end - start;
	const base = Math.floor(total / workers);
	const left = total % workers;
	const counts = new Array<number>(workers);
	for (const [k, worker] of interleaving(Array.from({ length: workers }, (_, i) => i)).entries()) {
		counts[worker] = base + ((k - division.rotation + workers) % workers < left ? 1 : 0);
	}
	const bounds = [start];
	for (const count of counts) bounds.push(bounds[bounds.length - 1]! + count);
	return bounds.slice(division.rank * perRank, (division.rank + 1) * perRank + 1);
}

/** Slice offsets of every worker of a rank, for shards of the given sample counts; a slice lies within a shard. */
export function shardWorkers(counts: readonly number[], division: Division): number[][] {
	const cuts = [0];
	for (const count of counts) cuts.push(cuts[cuts.length - 1]! + count);
	return divide(cuts[cuts.length - 1]!, division, cuts);
}

/** Slice offsets of every worker for rows without shards, as of joined datasets. */
export function sliceWorkers(total: number, division: Division): number[][] {
	return divide(total, division, []);
}

function divide(total: number, division: Division, cuts: readonly number[]): number[][] {
	const bounds = workerBounds(...subsetBounds(total, division.subset), division);
	return bounds.slice(0, -1).map((start, w) => {
		const end = bounds[w + 1]!;
		const pieces = [start, ...cuts.filter((cut) => cut > start && cut < end), end];
		const offsets: number[] = [];
		for (let i = 0; i + 1 < pieces.length; i++) {
			for (const offset of splitShard(pieces[i]!, pieces[i + 1]!, division.maxSamplesPerSequence)) offsets.push(offset);
		}
		offsets.push(end);
		return offsets.filter((offset, i) => i === offsets.length - 1 || offset < offsets[i + 1]!);
	});
}
