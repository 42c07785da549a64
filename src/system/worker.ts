/**
 * Worker threads. A worker's entry point is its source file or, in the executable, the module that build.ts embeds under its
 * path below src.
 */

/** Entry points of workers, paths below src without the extension. */
export const workerModules = [
	"checkpoint/native/save-worker",
	"checkpoint/native/writer-lock-worker",
	"checkpoint/write-back-worker",
	"data/energon/loader/thread",
	"data/energon/storage/fetcher",
	"data/megatron/encode-worker",
	"native/read-guard-worker",
	"observe/metrics/server-worker",
	"plan/concurrent-rank-worker",
] as const;

export function openWorker(module: (typeof workerModules)[number]): Worker {
	const embedded = import.meta.url.startsWith("file:///$bunfs/");
	return new Worker(embedded ? `/$bunfs/root/${module}.js` : new URL(`../${module}.ts`, import.meta.url).href);
}
