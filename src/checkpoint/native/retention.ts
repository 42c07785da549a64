/** Deletes old checkpoints after a save (docs/spec/runtime.md §10). */
import { existsSync, rmSync } from "node:fs";
import { join } from "node:path";
import { indexName } from "./manifest.ts";
import { latestIteration, listIterations } from "./reader.ts";

export interface Retention {
	/** Keep this many of the newest; unset: all. */
	readonly keep?: number | null;
	/** Keep those of iterations divisible by this, whatever `keep` says. With it alone, only those and the newest stay. */
	readonly retainInterval?: number | null;
	/** Folders' names of the only ones that may go: those that the run goes on from or has written. null: any. */
	readonly own?: readonly string[] | null;
}

/**
 * Deletes the checkpoints that the policy does not keep, never the one that `latest` names. The index is deleted first,
 * so that a half-deleted checkpoint is not taken for a whole one. Returns the deleted folders' names.
 */
export function applyRetention(root: string, { keep, retainInterval, own = null }: Retention): string[] {
	if (!keep && !retainInterval) return [];
	const latest = latestIteration(root);
	const iterations = listIterations(root).filter((name) => name !== "release" && (own === null || own.includes(name)));
	const newest = new Set(iterations.slice(-(keep || 1)));
	const deleted = iterations.filter((name) => {
		const iteration = Number(name.slice("iter_".length));
		const retained = retainInterval ? iteration % retainInterval === 0 : false;
		return !newest.has(name) && !retained && iteration !== latest;
	});
	for (const name of deleted) {
		const index = join(root, name, indexName);
		if (existsSync(index)) rmSync(index);
		rmSync(join(root, name), { recursive: true, force: true });
	}
	return deleted;
}
