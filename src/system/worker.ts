/**
 * Worker threads. Each has an entry point, which is the source file itself or, in the executable, an entry at its path below src,
 * as build.ts lists it.
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
