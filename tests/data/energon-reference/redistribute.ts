/** Another number of data ranks over the same logical workers (docs/spec/energon.md §4.3, §6). */
import { UserError } from "../../../src/system/errors.ts";
import type { RankState } from "./python-state.ts";

/**
 * States of `ranks` ranks out of those of any other number: all workers in order, cut into equal runs. The order of the
 * samples stays exact if all workers had made equally many outputs. Throws a UserError when they cannot be cut evenly.
 */
export function redistribute(states: readonly RankState[], ranks: number): RankState[] {
	const workers = states.flatMap((state) => state.workers);
	if (!(ranks > 0) || workers.length % ranks !== 0) {
		throw new UserError(
			`${workers.length} data workers cannot be shared by ${ranks} ranks: use a number of data ranks that divides ${workers.length}.`,
		);
	}
	const [first] = states;
	if (states.some(({ workers: own }) => own.length !== first!.workers.length)) {
		throw new UserError("The ranks of a saved loader state have different numbers of workers.");
	}
	const perRank = workers.length / ranks;
	return Array.from({ length: ranks }, (_, rank) => ({
		workers: workers.slice(rank * perRank, (rank + 1) * perRank),
		nextWorker: 0,
		microBatchSize: first!.microBatchSize,
	}));
}
