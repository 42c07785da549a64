/**
 * Continues a saved loader on another number of data ranks over the same logical workers (docs/spec/energon.md §4.3, §6): the
 * workers of all ranks in order, split into equal runs.
 */
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import type { LoaderState } from "./state.ts";

/**
 * `states`: of all data ranks of the saved run, in any order. Returns those of `worldSize` ranks with `numWorkers` workers
 * each. Throws a UserError if the new run could not continue exactly.
 */
export function resize(states: readonly LoaderState[], worldSize: number, numWorkers: number): LoaderState[] {
	const saved = [...states].sort((a, b) => a.rank - b.rank);
	const [first] = saved;
	if (first === undefined || saved.some(({ rank }, place) => rank !== place) || saved.length !== first.worldSize) {
		throw new UserError(
			`The saved data state has data ranks ${saved.map(({ rank }) => rank).join(", ") || "(none)"} of ${first?.worldSize ?? 0}; all are needed.`,
		);
	}
	if (first.worldSize === worldSize && first.numWorkers === numWorkers) return saved;
	const [before, now] = [first.worldSize * first.numWorkers, worldSize * numWorkers];
	if (before !== now || before === 0) {
		throw new UserError(
			`The data state was saved with ${counted(first.worldSize, "data rank")} of ${counted(first.numWorkers, "worker")}; a run of ${counted(worldSize, "data rank")} continues it exactly with ${fitting(before, worldSize)}.`,
		);
	}
	if (saved.some(({ nextWorker, ended }) => nextWorker !== 0 || ended.includes(true))) {
		throw new UserError(
			`The data state was saved in the middle of a round of the ${first.numWorkers} workers of a rank: continue with ${first.worldSize} data ranks, or from a checkpoint after a multiple of ${first.numWorkers} microbatches of a lane.`,
		);
	}
	const workers = saved.flatMap((state) => state.workers);
	return Array.from({ length: worldSize }, (_, rank) => ({
		settings: first.settings,
		rank,
		worldSize,
		numWorkers,
		nextWorker: 0,
		ended: new Array<boolean>(numWorkers).fill(false),
		workers: workers.slice(rank * numWorkers, (rank + 1) * numWorkers),
	}));
}

function fitting(workers: number, worldSize: number): string {
	if (workers > 0 && workers % worldSize === 0) return `num-workers ${workers / worldSize}`;
	return `no num-workers: use a number of data ranks that divides ${workers}`;
}
