/** Megatron's TikTokenizer: special tokens first, then byte strings by rank, of a JSON list of { rank, token_bytes, token_str }. */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { readJsonText, tokenizerLimits } from "../../system/json.ts";
import { mergeByRank } from "./byte-pairs.ts";
import { pieceTokenizer } from "./piece-tokenizer.ts";
import type { Tokenizer } from "./tokenizer.ts";

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

export interface TikTokenOptions {
	readonly pattern: keyof typeof patterns;
	/** Tokens of the vocabulary, special ones included: the file's first ones make up the rest. */
	readonly vocabularySize: number;
	readonly specialCount: number;
	/** The first special tokens; null: Megatron's. */
	readonly specialTokens: readonly string[] | null;
}

/** Opens a tiktoken vocabulary. Throws a UserError for a file of another format or with too few tokens. */
export function openTikToken(path: string, options: TikTokenOptions): Tokenizer {
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
