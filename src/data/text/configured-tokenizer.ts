/** The tokenizer that a configuration names: Megatron's kinds by their files. */

import { CryptoHasher } from "bun";
import * as v from "valibot";
import { type Companions, tokenizerOf } from "../../checkpoint/index.ts";
import { tokenizerKeys } from "../../config/keys/tokenizer.ts";
import type { CamelCase } from "../../config/names.ts";
import { fieldOf, type Key, propertyOf, type TrainingConfiguration } from "../../config/schema.ts";
import type { FolderReader } from "../../config/sources.ts";
import { UserError } from "../../system/errors.ts";
import { readWholeFile } from "../../system/input-file.ts";
import { readJsonText, tokenizerLimits } from "../../system/json.ts";
import { mergeByRank } from "./byte-pairs.ts";
import { pieceTokenizer } from "./piece-tokenizer.ts";
import { openSentencePiece } from "./sentencepiece/sentencepiece.ts";
import { byteTokenizer, openGpt2Tokenizer, openTokenizer, readTokenizerFile, type Tokenizer } from "./tokenizer.ts";

/** The keys that determine ids, as plain values. */
export type TokenizerKeys = Pick<TrainingConfiguration, CamelCase<keyof typeof tokenizerKeys>> & {
	readonly vocabSize: number | null;
};

export function tokenizerKeysOf(c: TokenizerKeys): TokenizerKeys {
	const names = [...(Object.keys(tokenizerKeys) as (keyof typeof tokenizerKeys)[]).map(propertyOf), "vocabSize"];
	return Object.fromEntries(names.map((name) => [name, c[name as keyof TokenizerKeys]])) as unknown as TokenizerKeys;
}

type Kind = "bytes" | "tokenizer.json" | "gpt2" | "tiktoken" | "sentencepiece" | "null";

const kinds: Readonly<Record<NonNullable<TokenizerKeys["tokenizerType"]>, Kind>> = {
	HuggingFaceTokenizer: "tokenizer.json",
	MultimodalTokenizer: "tokenizer.json",
	GPT2BPETokenizer: "gpt2",
	TikTokenizer: "tiktoken",
	SentencePieceTokenizer: "sentencepiece",
	GPTSentencePieceTokenizer: "sentencepiece",
	Llama2Tokenizer: "sentencepiece",
	NullTokenizer: "null",
};

function kindOf({ tokenizerType, tokenizer, vocabFile }: TokenizerKeys): Kind {
	if (tokenizerType !== null) return kinds[tokenizerType];
	if (tokenizer !== null) return tokenizer.endsWith(".model") ? "sentencepiece" : "tokenizer.json";
	return vocabFile === null ? "bytes" : "gpt2";
}

/** Opens it. Throws a UserError for files that cannot be read. */
export function configuredTokenizer(keys: TokenizerKeys): Tokenizer {
	const specialTokens = keys.tokenizerSpecialTokens;
	switch (kindOf(keys)) {
		case "bytes":
			return byteTokenizer;
		case "tokenizer.json": {
			const begins = keys.tokenizerType !== "MultimodalTokenizer" && !keys.tokenizerHfNoIncludeSpecialTokens;
			const surrounds = begins && keys.tokenizerType !== null;
			return openTokenizer(keys.tokenizer!, { specialTokens, surrounds, begins });
		}
		case "gpt2":
			return openGpt2Tokenizer({ vocabulary: keys.vocabFile!, merges: keys.mergeFile! }, { specialTokens });
		case "tiktoken":
			return openTikToken(keys.tokenizer!, {
				pattern: keys.tiktokenPattern,
				vocabularySize: keys.vocabSize ?? 2 ** 17,
				specialCount: keys.tiktokenNumSpecialTokens,
				specialTokens,
			});
		case "sentencepiece": {
			const legacy = keys.tokenizerSentencepieceLegacy;
			return openSentencePiece(keys.tokenizer!, { specialTokens: legacy ? (specialTokens ?? []) : null });
		}
		case "null":
			return nullTokenizer(keys);
	}
}

/** Megatron's NullTokenizer: text of ids with blanks between them. */
function nullTokenizer({ vocabSize, nullTokenizerEodId }: TokenizerKeys): Tokenizer {
	const vocabularySize = vocabSize ?? 2 ** 31 - 1;
	const encode = (text: string) =>
		Int32Array.from(text.split(" "), (number) => {
			const id = /^\s*\d+\s*$/.test(number) ? Number(number) : -1;
			if (id >= 0 && id < vocabularySize) return id;
			const shown = JSON.stringify(number.slice(0, 40));
			throw new UserError(
				`NullTokenizer reads ids below vocab-size ${vocabularySize} with a blank between them, not ${shown}.`,
			);
		});
	return {
		...byteTokenizer,
		vocabularySize,
		endOfDocument: nullTokenizerEodId ?? vocabularySize - 1,
		encode: (text) => encode(new TextDecoder().decode(text)),
		encodeParts: (parts) => encode(parts.map(({ text }) => text).join("")),
		decode: (ids) => Array.from(ids).join(" "),
		ordinaryText: (id) => (id >= 0 && id < vocabularySize ? `${id}` : null),
	};
}

/** The tokenizer in a sentence, by its file. */
export function nameOfTokenizer({ tokenizer, vocabFile, tokenizerType }: TokenizerKeys): string {
	return tokenizer ?? vocabFile ?? tokenizerType ?? "of bytes";
}

/** Throws a UserError where a model has too few ids for the tokenizer that its configuration names. */
export function requireRoom(tokenizer: Tokenizer, c: TokenizerKeys & { readonly vocabSize: number }): void {
	if (tokenizer.vocabularySize <= c.vocabSize) return;
	throw new UserError(
		`The tokenizer ${nameOfTokenizer(c)} has ${tokenizer.vocabularySize} tokens, more than --vocab-size ${c.vocabSize}.`,
	);
}

/** The content of the tokenizer's files, by the names that they have in a Hugging Face folder; "" where they have none there. */
function filesOf(keys: TokenizerKeys): (readonly [name: string, bytes: Uint8Array])[] {
	const read = (path: string) => readWholeFile(path, tokenizerLimits.bytes, { called: `the tokenizer file ${path}` });
	switch (kindOf(keys)) {
		case "bytes":
		case "null":
			return [];
		case "tokenizer.json":
			return [["tokenizer.json", readTokenizerFile(keys.tokenizer!).bytes]];
		case "gpt2":
			return [
				["vocab.json", read(keys.vocabFile!)],
				["merges.txt", read(keys.mergeFile!)],
			];
		case "tiktoken":
			return [["", read(keys.tokenizer!)]];
		case "sentencepiece":
			return [["tokenizer.model", read(keys.tokenizer!)]];
	}
}

/** The settings that determine ids, without paths: two equal ones give equal ids. Null for bytes. */
export function tokenizerIdentity(keys: TokenizerKeys): unknown {
	const kind = kindOf(keys);
	if (kind === "bytes") return null;
	const digests = filesOf(keys).map(([, bytes]) => new CryptoHasher("sha256").update(bytes).digest("hex"));
	if (kind === "tokenizer.json" && keys.tokenizerSpecialTokens === null) return digests[0];
	const { tokenizer: _, vocabFile: __, mergeFile: ___, ...settings } = keys;
	return { ...settings, files: digests };
}

/** Files of the tokenizer for a Hugging Face folder; none where such a folder has no place for it. */
export function savedTokenizer(keys: TokenizerKeys): Companions {
	if (kindOf(keys) === "tokenizer.json") return tokenizerOf(keys.tokenizer!);
	return new Map(filesOf(keys).filter(([name]) => name !== ""));
}

/**
 * vocab-size where it is not given: the tokenizer's. Null values and values of the wrong type, which are reported elsewhere, name no
 * tokenizer.
 */
export const readVocabularySize: FolderReader = (given) => {
	if (given("vocab-size") !== undefined || given("load-hf") !== undefined) return [];
	const value = (key: Key) => {
		const { type, default: standing } = fieldOf(key);
		const raw = given(key);
		return raw === undefined || !v.is(type.schema, raw) ? standing : raw;
	};
	const named = Object.keys(tokenizerKeys) as (keyof typeof tokenizerKeys)[];
	const keys = Object.fromEntries(named.map((key) => [propertyOf(key), value(key)])) as unknown as TokenizerKeys;
	const kind = kindOf(keys);
	const isNamed =
		kind === "gpt2" ? keys.vocabFile !== null && keys.mergeFile !== null : keys.tokenizer !== null && kind !== "null";
	if (!isNamed) return [];
	const { vocabularySize } = configuredTokenizer({ ...keys, vocabSize: null });
	return [{ key: "vocab-size", value: vocabularySize, from: nameOfTokenizer(keys), fixed: false }];
};

// Megatron's TikTokenizer: special tokens first, then byte strings by rank, of a JSON list of { rank, token_bytes, token_str }.

/** Megatron's first special tokens, by which it knows their meaning; </s> ends a document. */
const meanings = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"];

// Megatron's patterns. Its quantifiers are possessive, which here changes no match; \s of tiktoken is Unicode's white space.
const [space, notSpace] = ["\\p{White_Space}", "\\P{White_Space}"];
const ends = `\\p{N}| ?[^${space}\\p{L}\\p{N}]+`;
const [upper, lower] = ["\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}", "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"];
const before = "[^\\r\\n\\p{L}\\p{N}]?";
const patterns = {
	v1: `${before}\\p{L}+|${ends}[\\r\\n]*|${space}*[\\r\\n]|${space}+(?!${notSpace})|${space}+`,
	v2: `${before}[${upper}]*[${lower}]+|${before}[${upper}]+[${lower}]*|${ends}[\\r\\n/]*|${space}*[\\r\\n]+|${space}+(?!${notSpace})|${space}+`,
} as const;

const schema = v.array(v.looseObject({ rank: v.number(), token_bytes: v.string() }));

/** Words whose ids are remembered. */
const MOST_WORDS = 2 ** 16;

interface TikTokenOptions {
	readonly pattern: keyof typeof patterns;
	/** Tokens of the vocabulary, special ones included: the file's first ones make up the rest. */
	readonly vocabularySize: number;
	readonly specialCount: number;
	/** The first special tokens; null: Megatron's. */
	readonly specialTokens: readonly string[] | null;
}

/** Opens a tiktoken vocabulary. Throws a UserError for a file of another format or with too few tokens. */
function openTikToken(path: string, options: TikTokenOptions): Tokenizer {
	const { pattern, vocabularySize, specialCount } = options;
	const specials = specialTokensOf(options);
	const tokens = readTokens(path);
	const ordinary = vocabularySize - specialCount;
	if (ordinary < 256 || tokens.length < ordinary) {
		throw new UserError(
			`vocab-size ${vocabularySize} less ${specialCount} special tokens (tiktoken-num-special-tokens) are ${ordinary} tokens; ${path} has ${tokens.length}, and 256 are bytes.`,
		);
	}
	tokens.length = ordinary;
	const ranks = new Map(tokens.map((token, rank) => [token, rank]));
	const words = new RegExp(patterns[pattern], "gu");
	const remembered = new Map<string, readonly number[]>();
	const encodeWord = (word: string) => {
		const known = remembered.get(word);
		if (known !== undefined) return known;
		const bytes = Buffer.from(word).toString("latin1");
		const whole = ranks.get(bytes);
		const merged = whole === undefined ? mergeByRank([...bytes], (token) => ranks.get(token)) : [bytes];
		const ids = merged.map((token) => specialCount + ranks.get(token)!);
		if (remembered.size >= MOST_WORDS) remembered.clear();
		remembered.set(word, ids);
		return ids;
	};
	const decoded = (text: string) => Buffer.from(text, "latin1").toString();
	const textOf = (id: number) => tokens[id - specialCount] ?? null;
	return pieceTokenizer({
		vocabularySize,
		specials: new Map(specials.map((text, id) => [text, id])),
		recognisesInText: true,
		endOfDocument: specials.indexOf("</s>"),
		encode: (text) => Array.from(text.matchAll(words), ([word]) => encodeWord(word)).flat(),
		decode: (ids) => decoded(ids.map((id) => textOf(id) ?? "").join("")),
		textOf: (id) => {
			const text = textOf(id);
			return text === null ? null : decoded(text);
		},
	});
}

function specialTokensOf({ specialTokens, specialCount }: TikTokenOptions): string[] {
	const first = specialTokens ?? meanings;
	const missing = meanings.find((token) => !first.includes(token));
	if (missing !== undefined) {
		throw new UserError(`tokenizer-special-tokens has no ${missing}; TikTokenizer needs ${meanings.join(", ")}.`);
	}
	const all = [
		...first,
		...Array.from({ length: Math.max(0, specialCount - first.length) }, (_, i) => `<SPECIAL_${first.length + i}>`),
	];
	if (all.length !== specialCount || new Set(all).size !== all.length) {
		throw new UserError(
			`tokenizer-special-tokens has ${first.length} tokens; allowed are at most tiktoken-num-special-tokens (${specialCount}), each once.`,
		);
	}
	return all;
}

/** The byte strings of the file, a character a byte. Ranks are places in the list, and the first 256 are the bytes. */
function readTokens(path: string): string[] {
	const malformed = (what: string) => new UserError(`${path} is not a vocabulary of TikTokenizer: ${what}.`);
	let json: unknown;
	try {
		json = JSON.parse(readJsonText(path, tokenizerLimits));
	} catch (error) {
		if (error instanceof UserError) throw error;
		throw malformed((error as Error).message);
	}
	const { output, issues } = v.safeParse(schema, json, { abortEarly: true });
	if (issues !== undefined) throw malformed(`${v.getDotPath(issues[0]) ?? "all of it"} is malformed`);
	const seen = new Set<string>();
	return output.map(({ rank, token_bytes }, i) => {
		const token = Buffer.from(token_bytes, "base64").toString("latin1");
		if (rank !== i) throw malformed(`the rank of entry ${i} is ${rank}`);
		if (i < 256 && token !== String.fromCharCode(i)) throw malformed(`entry ${i} is not the byte ${i}`);
		if (token === "" || seen.has(token)) throw malformed(`entry ${i} is empty or occurs before`);
		seen.add(token);
		return token;
	});
}
