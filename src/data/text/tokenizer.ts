/** Text to token ids: bytes as they are, or a Hugging Face tokenizer.json. */
import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { Tokenizer as HuggingFaceTokenizer } from "@huggingface/tokenizers";
import { UserError } from "../../system/errors.ts";
import { type OpenOptions, readWholeFile } from "../../system/input-file.ts";
import { jsonText, tokenizerLimits } from "../../system/json.ts";
import { markSpecialTokens } from "./special-tokens.ts";
import { withBounds } from "./tokenizer-bounds.ts";
import { parseTokenizerFile } from "./tokenizer-file.ts";

/** A part of a text. Special tokens are recognised in markup alone; in data their characters are ordinary text. */
export interface TextPart {
	readonly text: string;
	readonly markup: boolean;
}

export interface Tokenizer {
	/** The largest id plus one. */
	readonly vocabularySize: number;
	/** Ids of UTF-8 text in which special tokens are recognised. */
	encode(text: Uint8Array): Int32Array;
	/** Ids of the parts as one text. */
	encodeParts(parts: readonly TextPart[]): Int32Array;
	decode(ids: ArrayLike<number>): string;
	/** Texts that are special tokens in markup. */
	readonly specialTokens: readonly string[];
	/** The text of a special or added token; null for every other id. */
	addedText(id: number): string | null;
	/** The text that an id stands for; null for special and added tokens, and for ids that the tokenizer does not have. */
	ordinaryText(id: number): string | null;
}

const utf8 = new TextEncoder();

/** 256 ids, one a byte. */
export const byteTokenizer: Tokenizer = {
	vocabularySize: 256,
	encode: (text) => Int32Array.from(text),
	encodeParts: (parts) => Int32Array.from(utf8.encode(parts.map(({ text }) => text).join(""))),
	decode: (ids) => new TextDecoder().decode(Uint8Array.from(Array.from(ids))),
	specialTokens: [],
	addedText: () => null,
	ordinaryText: (id) => (id >= 0 && id < 256 ? String.fromCharCode(id) : null),
};

/** The tokenizer.json of a path, itself or the one of a folder, with its bytes. */
export function readTokenizerFile(path: string): { readonly file: string; readonly bytes: Uint8Array } {
	const isFolder = existsSync(path) && statSync(path).isDirectory();
	const file = isFolder ? join(path, "tokenizer.json") : path;
	const options: OpenOptions = { called: `the tokenizer file ${file}`, inside: isFolder ? path : undefined };
	try {
		return { file, bytes: readWholeFile(file, tokenizerLimits.bytes, options) };
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		const reason = error.message.replace(/\.$/, "");
		throw new UserError(`${reason}; --tokenizer takes a tokenizer.json or a folder with one.`);
	}
}

/** Reads a tokenizer.json, or that of a folder. Special tokens are not added to encoded text. */
export function openTokenizer(given: string): Tokenizer {
	const { file: path, bytes } = readTokenizerFile(given);
	const file = parseTokenizerFile(jsonText(bytes, path, tokenizerLimits), path);
	const added = new Map((file.added_tokens ?? []).map(({ id, content }) => [id, content]));
	const specials = markSpecialTokens(file);
	let inner: HuggingFaceTokenizer;
	try {
		inner = withBounds(bytes.byteLength, () => new HuggingFaceTokenizer(file as never, {} as never));
	} catch (error) {
		throw new UserError(`${path} is not a tokenizer that can be read: ${(error as Error).message}.`);
	}
	let vocabularySize = 0;
	for (const id of inner.get_vocab().values()) vocabularySize = Math.max(vocabularySize, Number(id) + 1);
	const asked = <Result>(length: number, ask: () => Result): Result => {
		try {
			return withBounds(length, ask);
		} catch (error) {
			throw new UserError(`The tokenizer ${path} fails: ${(error as Error).message.replace(/\.$/, "")}.`);
		}
	};
	const encode = (text: string) => {
		const ids: (number | undefined)[] = asked(text.length, () => inner.encode(text, { add_special_tokens: false }).ids);
		// As in Python: a tokenizer without a token for the unknown leaves it out.
		return Int32Array.from(ids.filter((id) => id !== undefined));
	};
	return {
		vocabularySize,
		encode: (text) => encode(specials.mark(new TextDecoder().decode(text))),
		encodeParts: (parts) => {
			const marked = parts.map(({ text, markup }) => (markup ? specials.mark(text) : specials.plain(text)));
			return encode(marked.join("").toWellFormed());
		},
		decode: (ids) =>
			specials.unmark(asked(ids.length, () => inner.decode(Array.from(ids), { skip_special_tokens: false }))),
		specialTokens: specials.texts,
		addedText: (id) => added.get(id) ?? null,
		ordinaryText: (id) => (added.has(id) ? null : (inner.id_to_token(id) ?? null)),
	};
}
