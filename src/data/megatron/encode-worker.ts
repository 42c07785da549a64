/** Entry point of a thread of `mimo data prepare-text`: encodes the documents of JSON lines. */
import { messageOf, UserError } from "../../system/errors.ts";
import { configuredTokenizer, type TokenizerKeys } from "../text/configured-tokenizer.ts";
import type { Tokenizer } from "../text/tokenizer.ts";

declare const self: Worker;

/** How lines become token ids. */
export interface Encoding {
	readonly tokenizer: TokenizerKeys;
	readonly keys: readonly string[];
	/** Token put behind every document that has tokens; null: none. */
	readonly endId: number | null;
	/** The file's name in messages. */
	readonly path: string;
}

/** Consecutive lines of the file. */
export interface Lines {
	/** Number of the first. */
	readonly first: number;
	/** Their bytes without line ends, one after the other, and where each ends. */
	readonly bytes: Uint8Array;
	readonly ends: readonly number[];
}

/** The documents of lines, of one key. */
export interface Encoded {
	readonly ids: Int32Array;
	/** Tokens of every sequence of every document. */
	readonly lengths: readonly (readonly number[])[];
}

export type FromEncoder =
	| { readonly documents: readonly Encoded[] }
	| { readonly error: string; readonly user: boolean };

const text = new TextDecoder("utf-8", { ignoreBOM: true });
const utf8 = new TextEncoder();

/** The documents of lines, by key. Throws a UserError that names the first line without a document. */
function encodeLines(tokenizer: Tokenizer, { keys, endId, path }: Encoding, lines: Lines): Encoded[] {
	const found = keys.map(() => ({ pieces: [] as Int32Array[], lengths: [] as number[][] }));
	let begin = 0;
	for (const [i, end] of lines.ends.entries()) {
		const where = `${path}, line ${lines.first + i}`;
		const record = recordOf(text.decode(lines.bytes.subarray(begin, end)), where);
		begin = end;
		for (const [at, key] of keys.entries()) {
			const pieces = textsOf(record[key], key, where).map((sentence) => tokenizer.encode(utf8.encode(sentence)));
			const filled = pieces.filter(({ length }) => length > 0);
			const lengths = filled.map(({ length }) => length);
			if (endId !== null && filled.length > 0) {
				filled.push(Int32Array.of(endId));
				lengths.push(lengths.pop()! + 1);
			}
			found[at]!.pieces.push(...filled);
			found[at]!.lengths.push(lengths);
		}
	}
	return found.map(({ pieces, lengths }) => ({ ids: joined(pieces), lengths }));
}

function recordOf(line: string, where: string): Readonly<Record<string, unknown>> {
	let value: unknown;
	try {
		value = JSON.parse(line);
	} catch (error) {
		throw new UserError(`${where} is not JSON: ${(error as Error).message}.`);
	}
	if (typeof value === "object" && value !== null) return value as Record<string, unknown>;
	throw new UserError(`${where} is no JSON object.`);
}

/** A document is a text, or a list of the texts of its sequences. */
function textsOf(value: unknown, key: string, where: string): readonly string[] {
	const texts = Array.isArray(value) ? value : [value];
	if (texts.every((item) => typeof item === "string")) return texts;
	throw new UserError(
		`${where}: its field ${key} ${value === undefined ? "is missing" : "is neither a text nor a list of texts"}.`,
	);
}

function joined(pieces: readonly Int32Array[]): Int32Array {
	const all = new Int32Array(pieces.reduce((sum, { length }) => sum + length, 0));
	let at = 0;
	for (const piece of pieces) {
		all.set(piece, at);
		at += piece.length;
	}
	return all;
}

let encoding: Encoding;
let tokenizer: Tokenizer;

if (!Bun.isMainThread) {
	self.onmessage = ({ data }: MessageEvent<Encoding | Lines>) => {
		try {
			if ("keys" in data) {
				encoding = data;
				tokenizer = configuredTokenizer(data.tokenizer);
				return;
			}
			const documents = encodeLines(tokenizer, encoding, data);
			postMessage(
				{ documents } satisfies FromEncoder,
				documents.map(({ ids }) => ids.buffer as ArrayBuffer),
			);
		} catch (error) {
			postMessage({ error: messageOf(error), user: error instanceof UserError } satisfies FromEncoder);
		}
	};
}
