/** The claim of a run to the folder it saves into: named, alone, and among its own checkpoints, before the first step. */
import { mkdirSync } from "node:fs";
import {
	newRunName,
	ownHolder,
	requireOwnSteps,
	restoreReplaced,
	WriterClaim,
	type WriterLock,
} from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { exchangeTexts, type Group } from "../../parallel/index.ts";
import { fileError } from "../../system/system-errors.ts";
import { requireOtherFolder } from "./megatron-checkpoint.ts";
import { startOf } from "./starting-point.ts";

export interface SaveClaim {
	/** Name of the run, the same on every rank. */
	readonly run: string;
	/** On rank 0 of a run that saves. The receiver disposes it. */
	readonly lock: WriterLock | null;
	/** Names of the checkpoints that the run may replace and delete besides those it writes; null: any. */
	readonly own: readonly string[] | null;
}

/** Milliseconds between looks at another run's lock. */
const pollInterval = 500;

/**
 * Waits until no other run writes into the folder; `say` is called with the name of the run that it waits for. Throws a
 * UserError on rank 0 when another run stays, or when the folder holds checkpoints that are not this run's. Every rank
 * calls this together.
 */
export async function claimSaveFolder(
	c: TrainingConfiguration,
	everyone: Group,
	say: (sentence: string) => void,
): Promise<SaveClaim> {
	const first = everyone.rank === 0;
	const [run] = exchangeTexts(everyone, first ? newRunName() : "") as [string];
	if (c.save === null) return { run, lock: null, own: null };
	const claim = first ? new WriterClaim(makeFolder(c.save), ownHolder(run)) : null;
	for (let said = ""; ; ) {
		const attempt = claim?.attempt() ?? null;
		// Ranks that wait look together: a run without progress counts as stuck.
		const [waiting] = exchangeTexts(everyone, attempt?.waiting ?? "") as [string];
		if (waiting === "") return claimed(c, c.save, run, attempt?.lock ?? null);
		if (waiting !== said) say(waiting);
		said = waiting;
		await Bun.sleep(pollInterval);
	}
}

function claimed(c: TrainingConfiguration, save: string, run: string, lock: WriterLock | null): SaveClaim {
	if (lock === null) return { run, lock, own: null };
	try {
		requireOtherFolder(save);
		restoreReplaced(save);
		return { run, lock, own: c.saveOver ? null : requireOwnSteps(save, startOf(c)) };
	} catch (error) {
		lock[Symbol.dispose]();
		throw error;
	}
}

function makeFolder(path: string): string {
	try {
		mkdirSync(path, { recursive: true });
	} catch (error) {
		throw fileError("write", path, error);
	}
	return path;
}
