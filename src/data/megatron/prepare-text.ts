/** JSON lines to indexed data, as Megatron-LM's tools/preprocess_data.py: a document a line, in the order of the file. */
import { existsSync, rmSync } from "node:fs";
import { UserError } from "../../system/errors.ts";
import { linesOf } from "../../system/input-file.ts";
import { openWorker } from "../../system/worker.ts";
import { configuredTokenizer, nameOfTokenizer } from "../text/configured-tokenizer.ts";
import type { Encoded, Encoding, FromEncoder, Lines } from "./encode-worker.ts";
import { IndexedWriter } from "./indexed-file.ts";

export interface PrepareTextOptions {
	readonly encoding: Omit<Encoding, "endId">;
	/** Puts the token that ends a document behind every one: this id, or the tokenizer's own; null: no token. */
	readonly appended: number | "tokenizer's" | null;
	/** Files are PREFIX_KEY_document.bin and .idx. */
	readonly outputPrefix: string;
	readonly workers: number;
	/** Replace data that are there. */
	readonly overwrite: boolean;
}

export interface PreparedText {
	readonly documents: number;
	readonly tokens: number;
	/** Prefixes of the written data. */
	readonly prefixes: readonly string[];
}

/** Bytes of lines that a thread encodes at once, and of the longest line. */
const BATCH = 2 ** 18;
const LONGEST_LINE = 2 ** 28;
/** Batches of a thread: one that it encodes, and one that waits. */
const AHEAD = 2;

/** Encodes the file. Throws a UserError for lines that are no documents, and for data that are there already. */
export async function prepareText(options: PrepareTextOptions): Promise<PreparedText> {
	const { outputPrefix, workers, overwrite } = options;
	const { tokenizer } = options.encoding;
	const { vocabularySize, endOfDocument } = configuredTokenizer(tokenizer);
	const endId = options.appended === "tokenizer's" ? endOfDocument : options.appended;
	if (endId === null && options.appended !== null) {
		throw new UserError(
			`The tokenizer ${nameOfTokenizer(tokenizer)} names no token that ends a document: give --data-end-id.`,
		);
	}
	const encoding = { ...options.encoding, endId };
	const prefixes = encoding.keys.map((key) => `${outputPrefix}_${key}_document`);
	for (const prefix of prefixes) {
		if (existsSync(`${prefix}.idx`) && !overwrite) {
			throw new UserError(`${prefix}.idx is there already; --force-overwrite replaces it.`);
		}
	}
	const largest = Math.max(vocabularySize, (endId ?? 0) + 1);
	// An index is written last, and none stands beside other data meanwhile.
	for (const prefix of prefixes) rmSync(`${prefix}.idx`, { force: true });
	const writers = prefixes.map((prefix) => new IndexedWriter(prefix, largest));
	const threads = Array.from({ length: workers }, () => new EncoderThread(encoding));
	let [documents, tokens] = [0, 0];
	const write = (encoded: readonly Encoded[]) => {
		for (const [i, { ids, lengths }] of encoded.entries()) {
			let at = 0;
			for (const own of lengths) {
				const count = own.reduce((sum, length) => sum + length, 0);
				writers[i]!.add(ids.subarray(at, at + count), own);
				at += count;
			}
			tokens += ids.length;
		}
		documents += encoded[0]!.lengths.length;
	};
	try {
		const waiting: Promise<readonly Encoded[]>[] = [];
		let number = 0;
		for (const lines of batches(encoding.path)) {
			waiting.push(threads[number++ % workers]!.encode(lines));
			if (waiting.length >= AHEAD * workers) write(await waiting.shift()!);
		}
		for (const encoded of waiting) write(await encoded);
		for (const writer of writers) writer.finish();
	} finally {
		for (const thread of threads) thread[Symbol.dispose]();
		for (const writer of writers) writer[Symbol.dispose]();
	}
	return { documents, tokens, prefixes };
}

/** The lines of a file in batches. */
function* batches(path: string): Generator<Lines> {
	let parts: Uint8Array[] = [];
	let ends: number[] = [];
	let [first, size] = [1, 0];
	for (const { number, bytes } of linesOf(path, { limit: LONGEST_LINE, unended: true })) {
		parts.push(Uint8Array.from(bytes));
		size += bytes.length;
		ends.push(size);
		if (size < BATCH) continue;
		yield { first, bytes: Buffer.concat(parts), ends };
		[parts, ends, first, size] = [[], [], number + 1, 0];
	}
	if (parts.length > 0) yield { first, bytes: Buffer.concat(parts), ends };
}

/** A thread that encodes batches in the order in which they are given. */
class EncoderThread implements Disposable {
	readonly #worker = openWorker("data/megatron/encode-worker");
	readonly #waiting: PromiseWithResolvers<readonly Encoded[]>[] = [];

	constructor(encoding: Encoding) {
		this.#worker.onmessage = ({ data }: MessageEvent<FromEncoder>) => {
			const next = this.#waiting.shift()!;
			if ("documents" in data) next.resolve(data.documents);
			else next.reject(data.user ? new UserError(data.error) : new Error(data.error));
		};
		this.#worker.onerror = ({ message }) => {
			for (const next of this.#waiting.splice(0)) next.reject(new Error(message));
		};
		this.#worker.postMessage(encoding);
	}

	encode(lines: Lines): Promise<readonly Encoded[]> {
		const next = Promise.withResolvers<readonly Encoded[]>();
		// A batch that fails while an earlier one is awaited is not unheard of: it is awaited later.
		next.promise.catch(() => {});
		this.#waiting.push(next);
		this.#worker.postMessage(lines);
		return next.promise;
	}

	[Symbol.dispose](): void {
		this.#worker.terminate();
	}
}
