/**
 * Bounds on what the patterns of a tokenizer.json do in the tokenizer library. JavaScriptCore gives up a match that backtracks too
 * much and reports no match, which would split the text otherwise without a word; and replacements may grow a text to any length.
 * Both become errors here.
 */
import {
	PrependNormalizer,
	ReplaceDecoder,
	ReplaceNormalizer,
	ReplacePreTokenizer,
	SplitPreTokenizer,
} from "@huggingface/tokenizers";
import { countedPattern } from "./counted-pattern.ts";

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

const { normalize: prepend } = PrependNormalizer.prototype;
PrependNormalizer.prototype.normalize = function (text) {
	const result = prepend.call(this, text);
	grow(result.length - text.length);
	return result;
};
