/**
 * Threads. A worker is an entry point of its own; in the executable it lies under its path below src, which build.ts
 * lists, and run from source it is the file itself.
 */

/** Entry points of workers, paths below src without the extension. */
export const workerModules = [
	"checkpoint/native/save-worker",
	"checkpoint/native/writer-lock-worker",
	"checkpoint/write-back-worker",
	"data/energon/loader/thread",
	"data/energon/storage/fetcher",
	"plan/concurrent-rank-worker",
] as const;

export function openWorker(module: (typeof workerModules)[number]): Worker {
	const embedded = import.meta.url.startsWith("file:///$bunfs/");
	return new Worker(embedded ? `/$bunfs/root/${module}.js` : new URL(`../${module}.ts`, import.meta.url).href);
}
