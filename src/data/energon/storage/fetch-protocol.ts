/**
 * Messages between a data thread and its fetching thread. Reading is synchronous: the data thread waits on shared
 * memory for the answer.
 */
import type { CacheFolder } from "./cache-folder.ts";
import type { RemoteOptions, RemoteVersion } from "./remote-options.ts";

export type FetchRequest =
	| { readonly kind: "options"; readonly options: RemoteOptions; readonly folder: CacheFolder }
	| { readonly kind: "stat"; readonly url: string; readonly answer: SharedArrayBuffer }
	/** Requests a block in the cache. `answer` null: no thread waits for it yet. */
	| {
			readonly kind: "block";
			readonly version: RemoteVersion;
			readonly block: number;
			readonly answer: SharedArrayBuffer | null;
	  };

export const Answer = { pending: 0, done: 1, missing: 2, failed: 3, late: 4 } as const;
export type AnswerState = (typeof Answer)[keyof typeof Answer];

/** Offset of the text in an answer, behind the state, the length of the text, and a number. */
const TEXT = 16;
const BYTES = 4096;

export function newAnswer(): SharedArrayBuffer {
	return new SharedArrayBuffer(BYTES);
}

/** Fills an answer and wakes the thread that waits for it. */
export function give(answer: SharedArrayBuffer, state: AnswerState, text: string, number = 0): void {
	const bytes = new TextEncoder().encode(text).subarray(0, BYTES - TEXT);
	new Uint8Array(answer).set(bytes, TEXT);
	new Float64Array(answer)[1] = number;
	const words = new Int32Array(answer);
	words[1] = bytes.length;
	Atomics.store(words, 0, state);
	Atomics.notify(words, 0);
}

/** Waits for an answer, at most for `milliseconds`: then it is still pending. */
export function take(
	answer: SharedArrayBuffer,
	milliseconds: number,
): {
	readonly state: AnswerState;
	readonly text: string;
	number: number;
} {
	const words = new Int32Array(answer);
	const end = performance.now() + milliseconds;
	while (Atomics.load(words, 0) === Answer.pending && performance.now() < end) {
		Atomics.wait(words, 0, Answer.pending, Math.min(1000, milliseconds));
	}
	const text = new TextDecoder().decode(Uint8Array.from(new Uint8Array(answer, TEXT, words[1])));
	return { state: Atomics.load(words, 0) as AnswerState, text, number: new Float64Array(answer)[1]! };
}
