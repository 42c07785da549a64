/**
 * Bounds on what the patterns of a tokenizer.json do in the tokenizer library. JavaScriptCore gives up a match that backtracks too
 * much and reports no match, which would split the text otherwise without a word; and replacements may grow a text to any length.
 * Both become errors here.
 */
import {
	ByteLevelPreTokenizer,
	PrependNormalizer,
	ReplaceDecoder,
	ReplaceNormalizer,
	ReplacePreTokenizer,
	SplitPreTokenizer,
} from "@huggingface/tokenizers";

/*
 * Regular expressions of others in a form in which the engine counts what it does. JavaScriptCore counts the repetitions of
 * groups and gives up a match after a hundred million, some seconds; the repetitions of a character, a class or an escape are
 * not counted, so that a*a*a*b takes minutes on a thousand "a".
 */

/** A part of a pattern in Unicode mode with its quantifier: an escape, a class, the beginning of a group, or a character. */
const patternPart =
	/(\\(?:[pu]\{[^}]*\}|k<[^>]*>|ud[89ab]..\\ud[c-f]..|u.{4}|x..|c.|\d+|.)|\[(?:\\.|[^\\\]])*\]|\((?:\?(?:<?[=!]|[a-z-]*:|<[^>]*>))?|.)((?:[*+?]|\{\d+(?:,\d*)?\})\??)?/gisu;

/** Characters that a pattern may look at between two counted repetitions. Published patterns: up to 50. */
const LARGEST_WORK = 1024;

interface Part {
	readonly text: string;
	readonly quantifier: string;
	/** Repetitions that the quantifier allows. */
	readonly least: number;
	readonly most: number;
}

function partsOf(source: string): Part[] {
	return Array.from(source.matchAll(patternPart), ([, text, quantifier = ""]) => {
		const [, least, comma, most] = /^\{(\d+)(,?)(\d*)\}/.exec(quantifier) ?? [];
		const range =
			least === undefined
				? { least: /^[*?]/.test(quantifier) ? 0 : 1, most: /^[*+]/.test(quantifier) ? Infinity : 1 }
				: { least: Number(least), most: comma === "" ? Number(least) : most === "" ? Infinity : Number(most) };
		return { text: text!, quantifier, ...range };
	});
}

/** Ways in which a piece of a pattern may match at one place but for counted repetitions, and characters that they look at. */
interface Effort {
	readonly ways: number;
	readonly work: number;
}

/** The largest work of the pattern's alternatives. */
function largestWork(parts: readonly Part[]): number {
	let largest = 0;
	/** Of every group around the part: its alternatives before, and the one that the part is in. */
	const open: [before: Effort, alternative: Effort][] = [];
	const begin = () =>
		open.push([
			{ ways: 0, work: 0 },
			{ ways: 1, work: 0 },
		]);
	const endAlternative = () => {
		const [before, { ways, work }] = open.pop()!;
		largest = Math.max(largest, work);
		open.push([
			{ ways: before.ways + ways, work: before.work + work },
			{ ways: 1, work: 0 },
		]);
	};
	const add = ({ ways, work }: Effort, { least, most }: Part) => {
		// The repetitions that a quantifier demands are written out, without a count.
		const uncounted = Math.max(1, least);
		const [before, alternative] = open.pop()!;
		open.push([
			before,
			{
				ways: alternative.ways * (least === 0 && most === 1 ? ways + 1 : ways ** uncounted),
				work: alternative.work + alternative.ways * work * uncounted,
			},
		]);
	};
	begin();
	for (const part of parts) {
		if (part.text.startsWith("(")) begin();
		else if (part.text === "|") endAlternative();
		else if (part.text === ")") {
			endAlternative();
			add(open.pop()![0], part);
		} else add({ ways: 1, work: 1 }, part);
	}
	endAlternative();
	return largest;
}

/**
 * A pattern that matches the same, with repeated characters as groups: x* as (?:x)*. Repetitions behind which an alternative
 * demands nothing more stay as they are: the engine does not come back to them, and runs over a text of any length. Throws an
 * Error for a pattern that does too much between two counted repetitions.
 */
export function countedPattern(source: string): string {
	const parts = partsOf(source);
	if (largestWork(parts) > LARGEST_WORK) throw new Error(`its pattern ${source.slice(0, 200)} is too complex`);
	let counted = "";
	let depth = 0;
	/** Whether the alternative demands something behind the part, which may fail. */
	let mayFail = false;
	for (const { text, quantifier, least, most } of parts.reverse()) {
		const isOuter = depth === 0;
		if (text === ")") depth++;
		else if (text.startsWith("(")) depth--;
		if (text === "|" && isOuter) mayFail = false;
		const isCharacter = !/^(?:\(|[|)]$)/.test(text);
		const isCounted = isCharacter && most > 1 && (mayFail || !isOuter);
		counted = (isCounted ? `(?:${text})${quantifier}` : text + quantifier) + counted;
		if (isOuter && text !== "|" && least > 0) mayFail = true;
	}
	return counted;
}

/** Characters by which a text may grow, and times its length in addition: NFKC grows a character to 18. */
const LEAST_GROWTH = 2 ** 16;
const LARGEST_FACTOR = 32;

/** Milliseconds that the matches of a call may take, and those for each character in addition, a hundred times the usual. */
const LEAST_TIME = 10_000;
const TIME_PER_CHARACTER = 0.02;
/** Milliseconds that count of one match, which the engine itself bounds: a process may have been stopped meanwhile. */
const LONGEST_MATCH = 5000;

/** Characters by which replacements may still grow the text of the call in progress, and milliseconds of its matches. */
let [room, time] = [0, 0];

/** Runs a call of the library on a text of `length` characters. Throws an Error where a pattern passes its bounds. */
export function withBounds<Result>(length: number, call: () => Result): Result {
	room = LEAST_GROWTH + LARGEST_FACTOR * length;
	time = LEAST_TIME + TIME_PER_CHARACTER * length;
	return call();
}

/** Counts growth of the text. */
function grow(characters: number): void {
	room -= Math.max(0, characters);
	if (room < 0) throw new Error("its rules grow the text beyond all measure");
}

/** A regular expression that throws where the engine gives up. */
class BoundedPattern extends RegExp {
	/** The pattern, or else the empty match behind the text, which is always found unless the engine gives up. */
	readonly #whole: RegExp;

	constructor(pattern: RegExp | string, flags?: string) {
		super(pattern, flags);
		// A sticky pattern looks at one place, so that the empty match is there.
		this.#whole = new RegExp(`(?:${countedPattern(this.source)})|${this.sticky ? "" : "$"}()`, this.flags);
	}

	override exec(text: string): RegExpExecArray | null {
		const whole = this.#whole;
		whole.lastIndex = this.lastIndex;
		this.lastIndex = 0;
		if (whole.lastIndex > text.length) return null;
		const began = performance.now();
		const match = whole.exec(text);
		time -= Math.min(performance.now() - began, LONGEST_MATCH);
		if (match === null || time < 0)
			throw new Error(`its pattern ${this.source.slice(0, 200)} takes too long on a text`);
		if (match.pop() !== undefined) return null;
		this.lastIndex = whole.lastIndex;
		return match;
	}

	/** Replaces matches by a text as it stands, as the library in Python does. */
	override [Symbol.replace](text: string, content: string | ((match: string) => string)): string {
		return super[Symbol.replace](text, (match: string) => {
			const inserted = typeof content === "string" ? content : content(match);
			grow(inserted.length - match.length);
			return inserted;
		});
	}
}

for (const { prototype } of [ReplaceDecoder, ReplaceNormalizer, ReplacePreTokenizer, SplitPreTokenizer]) {
	// The library's constructors assign it.
	Object.defineProperty(prototype, "pattern", {
		set(this: object, pattern: RegExp | null) {
			const value = pattern === null ? null : new BoundedPattern(pattern);
			Object.defineProperty(this, "pattern", { value, configurable: true });
		},
	});
}

// White space is Unicode's, as in Rust's library: \s of JavaScript has U+FEFF beside it, and U+0085 is not in it.
const words =
	/'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
Object.defineProperty(ByteLevelPreTokenizer.prototype, "pattern", { get: () => words, set: () => {} });

const { normalize: prepend } = PrependNormalizer.prototype;
PrependNormalizer.prototype.normalize = function (text) {
	const result = prepend.call(this, text);
	grow(result.length - text.length);
	return result;
};
