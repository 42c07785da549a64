/** Tokenizer files whose rules backtrack, grow texts, or have many tokens, and files that are no files. */
import { afterAll, expect, test } from "bun:test";
import { mkdirSync, symlinkSync } from "node:fs";
import { join } from "node:path";
import { openTokenizer, type Tokenizer } from "../../src/data/text/tokenizer.ts";
import { countedPattern } from "../../src/data/text/tokenizer-bounds.ts";
import { Scratch } from "./fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

type Rule = Readonly<Record<string, unknown>>;

/** A tokenizer of characters with the given rules. */
function tokenizerWith(rules: Rule): Tokenizer {
	const letters = Array.from({ length: 95 }, (_, i) => String.fromCharCode(32 + i));
	const file = {
		added_tokens: [],
		normalizer: null,
		pre_tokenizer: null,
		post_processor: null,
		decoder: { type: "Fuse" },
		model: {
			type: "BPE",
			unk_token: null,
			vocab: Object.fromEntries(letters.map((letter, id) => [letter, id])),
			merges: [],
		},
		...rules,
	};
	return openTokenizer(scratch.file("tokenizer.json", JSON.stringify(file)));
}

const encode = (tokenizer: Tokenizer, text: string) => [...tokenizer.encode(new TextEncoder().encode(text))];
const split = (pattern: string, rule: Rule = {}) => ({
	pre_tokenizer: { type: "Split", pattern: { Regex: pattern }, behavior: "Isolated", invert: false, ...rule },
});
const replace = (pattern: Rule, content: string) => ({ type: "Replace", pattern, content });

/** Takes more steps than the engine makes on a text of forty "a" and a "b". */
const backtracking = "(a+)+$";
const hostile = `${"a".repeat(40)}b`;

test.each([
	["isolates", split(backtracking)],
	["removes", split(backtracking, { behavior: "Removed" })],
	["is replaced", { normalizer: replace({ Regex: backtracking }, "x") }],
])(
	"a pattern that the engine gives up is an error where it %s",
	(_, rules) => {
		const tokenizer = tokenizerWith(rules);
		expect(encode(tokenizer, "aab")).toBeArray();
		expect(() => encode(tokenizer, hostile)).toThrow(
			/^The tokenizer .*tokenizer\.json fails: its pattern \(a\+\)\+.* takes too long/,
		);
	},
	60_000,
);

test.each(["a*a*a*a*a*a*b", "a{0,999}a{0,999}a{0,999}b", "(?<x>a*)\\k<x>*a*b"])(
	"repetitions of a character are counted: %s",
	(pattern) => {
		const tokenizer = tokenizerWith(split(pattern));
		expect(encode(tokenizer, "aab")).toBeArray();
		expect(() => encode(tokenizer, "a".repeat(5000))).toThrow(/tokenizer\.json fails: its pattern .* takes too long/);
	},
	60_000,
);

test("many matches that each take long are an error", () => {
	const tokenizer = tokenizerWith(split("a*a*b|a"));
	expect(() => encode(tokenizer, "a".repeat(8000))).toThrow(/its pattern a\*a\*b\|a takes too long/);
}, 60_000);

test.each(["a?".repeat(30), "(?:a|ab){20}", "a{5000}", "(?:(?:a|b)?c?){9}"])(
	"a pattern that the engine follows without counting is refused: %s",
	(pattern) => {
		expect(() => tokenizerWith(split(`${pattern}x`))).toThrow(
			/tokenizer\.json is not .*: its pattern .* is too complex\.$/,
		);
	},
);

/** Of Llama 3 and of GPT-4o. */
const published = [
	String.raw`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
	String.raw`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'t|'re)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]+[\p{Ll}\p{Lo}\p{M}]*(?i:'s|'t|'re)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
];

test("counting changes no match", () => {
	const odd = String.raw`\u{1F600}+x|[\]a]*\)y|\uD83D\uDE00*?z|(?<n>[q\-]+)*\k<n>{2,}r|(?<=\x61+)\cJ{1,}b|\(\|*c|-??\u0062{2}d`;
	const text = `It's  a\n\n b😀😀x]]a)y😀😀z qqqqr aa\nb((||c -bbd 12345\t!?\r\n  WÖrter中文'RE `;
	for (const pattern of [...published, odd]) {
		const matches = (source: string) => Array.from(text.matchAll(new RegExp(source, "gu")), ([match]) => match);
		expect(countedPattern(pattern)).not.toBe(pattern);
		expect(matches(countedPattern(pattern))).toEqual(matches(pattern));
		expect(matches(pattern).length).toBeGreaterThan(6);
	}
});

test.each(published)(
	"a published pattern splits long runs of equal characters: %#",
	(pattern) => {
		const tokenizer = tokenizerWith(split(pattern));
		for (const character of ["a", " ", "!"]) expect(encode(tokenizer, character.repeat(200_000))).toHaveLength(200_000);
	},
	60_000,
);

test("a pattern of the decoder that the engine gives up is an error", () => {
	const model = { type: "BPE", unk_token: null, vocab: { b: 0, [hostile]: 1 }, merges: [] };
	const tokenizer = tokenizerWith({ model, decoder: replace({ Regex: backtracking }, "x") });
	expect(() => tokenizer.decode([1])).toThrow(/takes too long on a text\.$/);
}, 60_000);

test("splits and replacements are those of the pattern", () => {
	const parts = (rules: Rule, text: string) => tokenizerWith(rules).decode(encode(tokenizerWith(rules), text));
	for (const text of ["a", "ab12 cd", "12"]) expect(parts(split("\\d+"), text)).toBe(text);
	expect(parts(split("\\d+", { behavior: "Removed" }), "ab12 cd3")).toBe("ab cd");
	expect(parts(split("\\d+", { invert: true }), "ab12 cd3")).toBe("123");
	// As in Python, "$&" stands for itself.
	expect(parts({ normalizer: replace({ Regex: "b|$" }, "$&") }, "abc")).toBe("a$&c$&");
	expect(parts({ normalizer: replace({ String: "." }, "!") }, "a.b.")).toBe("a!b!");
});

test.each([
	[
		"a chain of replacements",
		{ normalizer: { type: "Sequence", normalizers: Array(9).fill(replace({ String: "a" }, "a".repeat(16))) } },
	],
	[
		"replacements while splitting",
		{ pre_tokenizer: { type: "Sequence", pretokenizers: Array(9).fill(replace({ String: "a" }, "a".repeat(16))) } },
	],
	["a long beginning", { normalizer: { type: "Prepend", prepend: "a".repeat(100_000) } }],
])("%s does not grow a text to any length", (_, rules) => {
	const before = process.memoryUsage().rss;
	expect(() => encode(tokenizerWith(rules), "a".repeat(64))).toThrow(
		"fails: its rules grow the text beyond all measure.",
	);
	expect(process.memoryUsage().rss - before).toBeLessThan(2 ** 28);
});

test("long texts in the place of a blank or of a word's end are malformed", () => {
	const long = "x".repeat(65);
	expect(() => tokenizerWith({ pre_tokenizer: { type: "Metaspace", replacement: long } })).toThrow(
		"pre_tokenizer.replacement is malformed",
	);
	const nested = { type: "Sequence", pretokenizers: [{ type: "Metaspace", replacement: long }] };
	expect(() => tokenizerWith({ pre_tokenizer: nested })).toThrow(
		"pre_tokenizer.pretokenizers.0.replacement is malformed",
	);
	const model = { type: "BPE", vocab: { a: 0 }, merges: [], end_of_word_suffix: long };
	expect(() => tokenizerWith({ model })).toThrow("model.end_of_word_suffix is malformed");
});

test("a hundred thousand special tokens are recognised, the longest first", () => {
	const added = Array.from({ length: 100_000 }, (_, i) => ({ id: 95 + i, content: `<t${i}>`, special: true }));
	const tokenizer = tokenizerWith({ added_tokens: [...added, { id: 200_000, content: "<t7><t8>", special: true }] });
	expect(encode(tokenizer, "a<t99999>b<t7><t8><t7")).toEqual([65, 95 + 99_999, 66, 200_000, 28, 84, 23]);
	expect(encode(tokenizer, "<t".repeat(50_000))).toHaveLength(100_000);
}, 60_000);

test("more added tokens than memory has room for are refused, and longer ones than any", () => {
	const token = (id: number, length: number) => ({ id, content: String(id).padEnd(length, "x"), special: true });
	const added = Array.from({ length: 2100 }, (_, i) => token(i, 4000));
	expect(() => tokenizerWith({ added_tokens: added })).toThrow(
		/has added tokens of 8400000 characters together; at most 8388608 are read/,
	);
	expect(() => tokenizerWith({ added_tokens: [token(0, 4097)] })).toThrow("added_tokens.0.content is malformed");
});

test("values, depth and kind of the file are bounded before it is parsed", () => {
	const refused = (path: string) => {
		try {
			openTokenizer(path);
			return "";
		} catch (error) {
			return (error as Error).message;
		}
	};
	expect(refused(scratch.file("deep.json", "[".repeat(200_000)))).toMatch(
		/deep\.json is nested more than 64 levels deep/,
	);
	expect(refused("/dev/zero")).toMatch(
		/^Cannot open the tokenizer file \/dev\/zero: it is not a regular file; --tokenizer takes/,
	);
	const pipe = join(scratch.path, "pipe");
	Bun.spawnSync(["mkfifo", pipe]);
	expect(refused(pipe)).toMatch(/pipe: it is not a regular file/);
	const secret = scratch.file("secret.json", "{}");
	const folder = join(scratch.path, "model");
	mkdirSync(folder);
	symlinkSync(secret, join(folder, "tokenizer.json"));
	expect(refused(folder)).toMatch(
		/model\/tokenizer\.json: it is a link that leads out of its folder, to .*secret\.json/,
	);
	// A path that the user gives may be a link.
	expect(refused(join(folder, "tokenizer.json"))).toMatch(/is not a tokenizer\.json/);
});
