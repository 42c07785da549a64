/** The claim of a run to the folder it saves into: named, alone, and among its own checkpoints, before the first step. */
import { mkdirSync } from "node:fs";
import {
	localFolder,
	newRunName,
	ownHolder,
	requireOwnSteps,
	restoreReplaced,
	WriterClaim,
	type WriterLock,
} from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { exchangeTexts, type Group } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { fileError } from "../../system/system-errors.ts";
import { requireOtherFolder } from "./megatron-checkpoint.ts";
import { refreshStores, shareOfHost, storesOf } from "./object-stores.ts";
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
	await refreshTogether(c, everyone);
	if (c.save === null) return { run, lock: null, own: null };
	const save = localFolder(c.save, c.stagingDir);
	const claim = first ? new WriterClaim(makeFolder(save), ownHolder(run)) : null;
	for (let said = ""; ; ) {
		const attempt = claim?.attempt() ?? null;
		// Ranks that wait look together: a run without progress counts as stuck.
		const [waiting] = exchangeTexts(everyone, attempt?.waiting ?? "") as [string];
		if (waiting === "") return claimed(c, save, run, attempt?.lock ?? null);
		if (waiting !== said) say(waiting);
		said = waiting;
		await Bun.sleep(pollInterval);
	}
}

/** The first rank of every host brings the lists of stores; a failure of any is the sentence of all. */
async function refreshTogether(c: TrainingConfiguration, everyone: Group): Promise<void> {
	if (storesOf(c).length === 0) return;
	let failure = "";
	try {
		if (shareOfHost().part === 0) await refreshStores(c, { again: true });
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		failure = error.message;
	}
	const failed = exchangeTexts(everyone, failure).find((text) => text !== "");
	if (failed !== undefined) throw new UserError(failed);
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
