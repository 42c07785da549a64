/** Text to token ids: bytes as they are, or a Hugging Face tokenizer.json. */

import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { BPE, ByteLevelPreTokenizer, Tokenizer as HuggingFaceTokenizer } from "@huggingface/tokenizers";
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { type OpenOptions, readWholeFile, readWholeText } from "../../system/input-file.ts";
import { jsonText, readJsonText, tokenizerLimits } from "../../system/json.ts";
import { configuredTokens } from "./chat/template-file.ts";
import { TextTrie } from "./piece-tokenizer.ts";
import { withBounds } from "./tokenizer-bounds.ts";

/** A part of a text. Special tokens are recognised in markup alone; in data their characters are ordinary text. */
export interface TextPart {
	readonly text: string;
	readonly markup: boolean;
}

export interface Tokenizer {
	/** The largest id plus one. */
	readonly vocabularySize: number;
	/** The id that ends a document (Megatron's eod); null: the tokenizer says none. */
	readonly endOfDocument: number | null;
	/** The id that its file puts before a text, as transformers does (a beginning of sequence); null: the text begins at once. */
	readonly beginOfText: number | null;
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
const utf8Text = new TextDecoder("utf-8", { ignoreBOM: true });

/** 256 ids, one a byte. */
export const byteTokenizer: Tokenizer = {
	vocabularySize: 256,
	endOfDocument: null,
	beginOfText: null,
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

export interface HuggingFaceOptions {
	/** Special tokens beside those of the file; ids follow the file's. */
	readonly specialTokens?: readonly string[] | null;
	/** Whether an encoded text gets the tokens that the file puts around one. */
	readonly surrounds?: boolean;
	/** Whether beginOfText is the file's. */
	readonly begins?: boolean;
}

/** Reads a tokenizer.json, or that of a folder. */
export function openTokenizer(given: string, options: HuggingFaceOptions = {}): Tokenizer {
	const { file: path, bytes } = readTokenizerFile(given);
	const file = parseTokenizerFile(jsonText(bytes, path, tokenizerLimits), path);
	const end = () => configuredTokens(given).eos_token ?? null;
	return buildTokenizer(file, { path, bytes: bytes.byteLength, end }, options);
}

interface FileSource {
	readonly path: string;
	/** Size of the file, by which the work on it is bounded. */
	readonly bytes: number;
	/** The special token that ends a document. */
	readonly end: () => string | null;
}

function buildTokenizer(file: TokenizerFile, { path, bytes, end }: FileSource, options: HuggingFaceOptions): Tokenizer {
	addSpecialTokens(file, options.specialTokens ?? []);
	const added = new Map((file.added_tokens ?? []).map(({ id, content }) => [id, content]));
	const around = surroundings(file.post_processor);
	const { before, after } = options.surrounds ? around : none;
	const specials = markSpecialTokens(file);
	let inner: HuggingFaceTokenizer;
	try {
		inner = withBounds(bytes, () => new HuggingFaceTokenizer(file as never, {} as never));
	} catch (error) {
		throw new UserError(`${path} is not a tokenizer that can be read: ${(error as Error).message}.`);
	}
	if (inner.model instanceof BPE) inner.model.cache = new WordCache() as never;
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
		return ids.filter((id) => id !== undefined);
	};
	return {
		vocabularySize,
		get endOfDocument() {
			const text = end();
			return [...added].find(([, content]) => content === text)?.[0] ?? null;
		},
		beginOfText: options.begins ? (around.before.at(-1) ?? null) : null,
		encode: (text) => Int32Array.from([...before, ...encode(specials.mark(utf8Text.decode(text))), ...after]),
		encodeParts: (parts) => {
			const marked = parts.map(({ text, markup }) => (markup ? specials.mark(text) : specials.plain(text)));
			return Int32Array.from(encode(marked.join("").toWellFormed()));
		},
		decode: (ids) =>
			ids.length === 0
				? ""
				: specials.unmark(
						asked(ids.length, () =>
							inner.decode(Array.from(ids), { skip_special_tokens: false, clean_up_tokenization_spaces: false }),
						),
					),
		specialTokens: specials.texts,
		addedText: (id) => added.get(id) ?? null,
		ordinaryText: (id) => (added.has(id) ? null : (inner.id_to_token(id) ?? null)),
	};
}

/** Bytes of a list of merges: 2^24 of them. */
const LARGEST_MERGES = 2 ** 28;

/** Reads the vocab.json and merges.txt of GPT-2's tokenizer. */
export function openGpt2Tokenizer(
	{ vocabulary, merges }: { readonly vocabulary: string; readonly merges: string },
	options: HuggingFaceOptions = {},
): Tokenizer {
	const text = readJsonText(vocabulary, tokenizerLimits, { called: `the vocabulary ${vocabulary}` });
	const lines = readWholeText(merges, LARGEST_MERGES, { called: `the list of merges ${merges}` }).split("\n");
	const pairs = lines.map((line) => line.trimEnd()).filter((line) => line !== "" && !line.startsWith("#version"));
	const byteLevel = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true };
	const json = JSON.stringify({
		...{ added_tokens: [], normalizer: null, pre_tokenizer: byteLevel, post_processor: null, decoder: byteLevel },
		model: { type: "BPE", merges: pairs },
	});
	const file = parseTokenizerFile(`${json.slice(0, -2)},"vocab":${text}}}`, vocabulary);
	for (const [i, pair] of pairs.entries()) {
		if (/^[^ ]+ [^ ]+$/.test(pair) && pair.replace(" ", "") in file.model.vocab) continue;
		throw new UserError(`${merges}: merge ${i + 1}, ${JSON.stringify(pair)}, makes no token of ${vocabulary}.`);
	}
	const source = { path: vocabulary, bytes: text.length, end: () => GPT2_END };
	return buildTokenizer(file, source, { ...options, specialTokens: [GPT2_END, ...(options.specialTokens ?? [])] });
}

const GPT2_END = "<|endoftext|>";

/** Adds special tokens: a token of the vocabulary keeps its id, others follow. */
function addSpecialTokens(file: TokenizerFile, tokens: readonly string[]): void {
	const { vocab } = file.model;
	const entries = Array.isArray(vocab) ? vocab.map(([content], i) => [content, i] as const) : Object.entries(vocab);
	const ids = new Map([...entries, ...(file.added_tokens ?? []).map(({ content, id }) => [content, id] as const)]);
	let next = 1 + [...ids.values()].reduce((a, b) => Math.max(a, b), -1);
	file.added_tokens ??= [];
	for (const content of tokens) {
		const known = file.added_tokens.find((token) => token.content === content);
		if (known) known.special = true;
		else file.added_tokens.push({ id: ids.get(content) ?? next++, content, special: true });
	}
}

interface Surroundings {
	readonly before: readonly number[];
	readonly after: readonly number[];
}
const none: Surroundings = { before: [], after: [] };

/** The ids that a post-processor puts around a text. */
function surroundings(processor: Processor | null | undefined): Surroundings {
	if (!processor) return none;
	const { processors, single, special_tokens: tokens, cls, sep } = processor;
	if (processors) {
		return processors.map(surroundings).reduce(
			(inner, outer) => ({
				before: [...outer.before, ...inner.before],
				after: [...inner.after, ...outer.after],
			}),
			none,
		);
	}
	if (cls && sep) return { before: [cls[1]], after: [sep[1]] };
	if (!single) return none;
	const at = single.findIndex(({ SpecialToken }) => !SpecialToken);
	const ids = (items: typeof single) => items.flatMap(({ SpecialToken: t }) => (t && tokens?.[t.id]?.ids) ?? []);
	return { before: ids(single.slice(0, at)), after: ids(single.slice(at + 1)) };
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

/** The post-processor that puts tokens around a text. */
interface Processor {
	readonly processors?: readonly Processor[] | undefined;
	readonly single?: readonly { readonly SpecialToken?: { readonly id: string } | undefined }[] | undefined;
	readonly special_tokens?: Readonly<Record<string, { readonly ids: readonly number[] }>> | undefined;
	readonly cls?: readonly [string, number] | undefined;
	readonly sep?: readonly [string, number] | undefined;
}
const processor: v.GenericSchema<Processor> = v.looseObject({
	processors: v.optional(v.array(v.lazy(() => processor))),
	single: v.optional(v.array(v.looseObject({ SpecialToken: v.optional(v.looseObject({ id: v.string() })) }))),
	special_tokens: v.optional(v.record(v.string(), v.looseObject({ ids: v.array(id) }))),
	cls: v.optional(v.tuple([v.string(), id])),
	sep: v.optional(v.tuple([v.string(), id])),
});

/** Any text may be a token: valibot's records leave out `constructor` and `prototype`. */
const idsByToken = v.custom<Record<string, number>>(
	(value) => typeof value === "object" && value !== null && Object.values(value).every((item) => v.is(id, item)),
);

const schema = v.looseObject({
	added_tokens: v.optional(v.array(v.looseObject({ id, content: token, special: v.optional(v.boolean()) }))),
	pre_tokenizer: v.nullish(step),
	post_processor: v.nullish(processor),
	model: v.looseObject({
		continuing_subword_prefix: insertion,
		end_of_word_suffix: insertion,
		/** BPE and WordPiece: ids by token. Unigram: tokens with their scores. */
		vocab: v.union([v.array(v.tuple([v.string(), v.number()])), idsByToken]),
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

// Words of texts with what the tokenizer library makes of them: most words of a text have come before.

/** Words that are kept. */
const MOST_WORDS = 2 ** 17;
/** Characters of the longest word that is kept. */
const LONGEST_WORD = 256;

/** Stands for the library's cache, which has ten thousand words and spends more time on their order than it saves. */
class WordCache<Value> {
	readonly #values = new Map<string, Value>();

	get(word: string): Value | undefined {
		return this.#values.get(word);
	}

	put(word: string, value: Value): void {
		if (word.length > LONGEST_WORD) return;
		if (this.#values.size >= MOST_WORDS) this.#values.clear();
		this.#values.set(word, value);
	}

	clear(): void {
		this.#values.clear();
	}
}

/** Bytes of words, a character each. */
const bytes = new WordCache<string>();
const { pre_tokenize_text: original } = ByteLevelPreTokenizer.prototype;

ByteLevelPreTokenizer.prototype.pre_tokenize_text = function (text) {
	if (!this.use_regex || this.add_prefix_space) return original.call(this, text);
	return Array.from(text.match(this.pattern) ?? [], (word) => {
		const known = bytes.get(word);
		if (known !== undefined) return known;
		const one = original.call(Object.create(this, { use_regex: { value: false } }), word)[0]!;
		bytes.put(word, one);
		return one;
	});
};
