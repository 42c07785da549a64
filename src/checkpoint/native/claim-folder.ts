/** Waits for the right to write into a folder, for commands of one process. */
import { lockTimes, newRunName, ownHolder, WriterClaim, type WriterLock } from "./writer-lock.ts";

/** Milliseconds between looks at another writer's lock. */
const pollInterval = 500;

/**
 * The lock of `folder`, which exists; the caller disposes it. `flag` names the folder in sentences, `say` is told of the
 * writer that is waited for. Throws a UserError that names it when it stays.
 */
export async function claimFolder(folder: string, flag: string, note: (sentence: string) => void): Promise<WriterLock> {
	const claim = new WriterClaim(folder, ownHolder(newRunName()), lockTimes, flag);
	for (let said = ""; ; ) {
		const { lock, waiting } = claim.attempt();
		if (lock !== undefined) return lock;
		if (waiting !== said) note(waiting);
		said = waiting;
		await Bun.sleep(pollInterval);
	}
}
