/** Ends a process whose main thread reads data when a read does not return, which the main thread itself cannot notice. */
import { newReadWatch, showReads } from "../system/read-watch.ts";
import { openWorker } from "../system/worker.ts";

/** A message to the guarding thread; null: there is nothing to guard now. */
export type Guarded = { readonly watch: SharedArrayBuffer; readonly milliseconds: number } | null;

/** Of this process, once it is needed. */
let thread: Worker | null = null;

function post(message: Guarded): void {
	if (thread === null) {
		thread = openWorker("native/read-guard-worker");
		thread.unref();
	}
	thread.postMessage(message);
}

/** Until it is disposed, a read of this thread of more than `milliseconds` ends the process with a sentence that names the file. */
export class ReadGuard implements Disposable {
	constructor(milliseconds: number) {
		const watch = newReadWatch();
		post({ watch, milliseconds });
		showReads(watch);
	}

	[Symbol.dispose](): void {
		showReads(null);
		post(null);
	}
}
