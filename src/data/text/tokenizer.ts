/** Text to token ids: bytes as they are, or a Hugging Face tokenizer.json. */

import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { Tokenizer as HuggingFaceTokenizer } from "@huggingface/tokenizers";
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { type OpenOptions, readWholeFile } from "../../system/input-file.ts";
import { jsonText, tokenizerLimits } from "../../system/json.ts";
import { TextTrie } from "./text-trie.ts";
import { withBounds } from "./tokenizer-bounds.ts";

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

// Special tokens apart from text that looks like them. In a tokenizer.json they are strings, so that "<|im_end|>" in
// the text of a sample would end a turn. Here their strings begin with a mark that no text has: a tokenizer read from
// the marked file recognises them only where this program has written the mark.

/** A code point that is assigned to no character, for internal use. */
const MARK = "\u{10ffff}";
const marks = /\u{10ffff}/gu;

interface SpecialTokens {
	readonly texts: readonly string[];
	/** The text with every special token in it marked. */
	mark(text: string): string;
	/** The text with none. */
	plain(text: string): string;
	/** Removes the marks from text that a tokenizer of the marked file has decoded. */
	unmark(text: string): string;
}

/** Marks the special tokens of a tokenizer.json in place. */
function markSpecialTokens(file: TokenizerFile): SpecialTokens {
	const special = (file.added_tokens ?? []).filter((token) => token.special === true);
	const contents = new Set(special.map(({ content }) => content));
	for (const token of special) token.content = MARK + token.content;
	const { model } = file;
	if (Array.isArray(model.vocab)) {
		for (const entry of model.vocab) if (contents.has(entry[0])) entry[0] = MARK + entry[0];
	} else if (model.vocab) {
		// Tokens that merges make from text are text, even where a special token is spelled the same.
		const merged = new Set(
			(model.merges ?? []).map((pair) => (typeof pair === "string" ? pair.replace(" ", "") : pair.join(""))),
		);
		for (const content of contents) {
			const id = model.vocab[content];
			if (id === undefined) continue;
			if (!merged.has(content)) delete model.vocab[content];
			model.vocab[MARK + content] = id;
		}
	}
	if (typeof model.unk_token === "string" && contents.has(model.unk_token)) model.unk_token = MARK + model.unk_token;
	const texts = [...contents].sort((a, b) => b.length - a.length);
	const trie = new TextTrie(texts);
	const plain = (text: string) => text.replace(marks, "\ufffd");
	return {
		texts,
		plain,
		mark: (text) => trie.replace(plain(text), (token) => MARK + token),
		unmark: (text) => text.replace(marks, ""),
	};
}

// Reads and checks the parts of a tokenizer.json that this program uses, and that the tokenizer library trusts.

/** Ids are places in a table. */
const id = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(2 ** 24));
const token = v.pipe(v.string(), v.minLength(1), v.maxLength(4096));
/** Characters of all added tokens: the library keeps a node for each. */
const LARGEST_ADDED = 2 ** 23;
/** Texts that the library inserts for every word or blank. */
const insertion = v.nullish(v.pipe(v.string(), v.maxLength(64)));

/** A step of normalization or splitting, with the steps within it. */
interface Step {
	readonly replacement?: string | null | undefined;
	readonly pretokenizers?: readonly (Step | null)[] | null | undefined;
}
const step: v.GenericSchema<Step> = v.looseObject({
	replacement: insertion,
	pretokenizers: v.nullish(v.array(v.nullable(v.lazy(() => step)))),
});

const schema = v.looseObject({
	added_tokens: v.optional(v.array(v.looseObject({ id, content: token, special: v.optional(v.boolean()) }))),
	pre_tokenizer: v.nullish(step),
	model: v.looseObject({
		continuing_subword_prefix: insertion,
		end_of_word_suffix: insertion,
		/** BPE and WordPiece: ids by token. Unigram: tokens with their scores. */
		vocab: v.union([v.record(v.string(), id), v.array(v.tuple([v.string(), v.number()]))]),
		unk_token: v.nullish(v.string()),
		merges: v.optional(v.array(v.union([v.string(), v.tuple([v.string(), v.string()])]))),
	}),
});

type TokenizerFile = v.InferOutput<typeof schema>;

/** The content of a tokenizer.json. Throws a UserError that names the first malformed field. */
function parseTokenizerFile(text: string, path: string): TokenizerFile {
	let json: unknown;
	try {
		json = JSON.parse(text);
	} catch (error) {
		throw new UserError(`The tokenizer file ${path} is not JSON: ${(error as Error).message}.`);
	}
	const { output, issues } = v.safeParse(schema, json, { abortEarly: true });
	if (issues !== undefined) {
		throw new UserError(`${path} is not a tokenizer.json: ${v.getDotPath(issues[0]) ?? "all of it"} is malformed.`);
	}
	const added = (output.added_tokens ?? []).reduce((sum, { content }) => sum + content.length, 0);
	if (added > LARGEST_ADDED) {
		throw new UserError(`${path} has added tokens of ${added} characters together; at most ${LARGEST_ADDED} are read.`);
	}
	return output;
}
