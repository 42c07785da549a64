/**
 * Marker characters in a rendered conversation for what its text cannot express: special tokens that are the data's own text,
 * places of images, parts in the loss. They are Unicode noncharacters, which no text may contain.
 */
import { UserError } from "../../../system/errors.ts";

export const marks = {
	/** Around a special token in the data's text, which is not a special token there. One alone only breaks the text. */
	dataBegin: "\ufdd0",
	dataEnd: "\ufdd1",
	/** An image in a turn's text. */
	image: "\ufdd2",
	/** Around what a `{% generation %}` block writes. */
	lossBegin: "\ufdd3",
	lossEnd: "\ufdd4",
	/** Around the content of a turn, where it is looked for. */
	contentBegin: "\ufdd5",
	contentEnd: "\ufdd6",
} as const;

const anyMark = /[\ufdd0-\ufdef]/g;

/** Marks the special tokens in what a sample says. */
export class DataMarks {
	readonly #pattern: RegExp | null;
	/** Beginnings of special tokens that are not whole. */
	readonly #beginnings: ReadonlySet<string>;
	readonly #longest: number;

	/** `specials`: texts that stand for themselves in data. */
	constructor(specials: readonly string[]) {
		const longestFirst = [...new Set(specials)].filter((text) => text !== "").sort((a, b) => b.length - a.length);
		this.#pattern =
			longestFirst.length === 0 ? null : new RegExp(longestFirst.map((text) => RegExp.escape(text)).join("|"), "g");
		this.#beginnings = new Set(
			longestFirst.flatMap((text) => Array.from({ length: text.length - 1 }, (_, i) => text.slice(0, i + 1))),
		);
		this.#longest = longestFirst[0]?.length ?? 0;
	}

	/** A text with its special tokens marked, and broken where it ends in the beginning of one. */
	text(data: string): string {
		const plain = data.replace(anyMark, "\ufffd");
		const marked = this.#marked(plain);
		for (let length = Math.min(this.#longest, plain.length); length > 0; length--) {
			if (this.#beginnings.has(plain.slice(-length))) return `${marked}${marks.dataBegin}`;
		}
		return marked;
	}

	/** A value of a JSON record with all its texts marked, as a template can take it. */
	value(data: unknown): unknown {
		if (typeof data === "string") return this.text(data);
		if (typeof data === "bigint") return Number(data);
		if (Array.isArray(data)) return data.map((item) => this.value(item));
		if (typeof data !== "object" || data === null) return data;
		return Object.fromEntries(
			Object.entries(data).map(([key, value]) => [this.#marked(key.replace(anyMark, "\ufffd")), this.value(value)]),
		);
	}

	#marked(plain: string): string {
		if (this.#pattern === null) return plain;
		return plain.replace(this.#pattern, (token) => `${marks.dataBegin}${token}${marks.dataEnd}`);
	}
}

/** A text without marks. */
export function withoutMarks(text: string): string {
	return text.replace(anyMark, "");
}

/** Refuses a template that has marks in its own text. */
export function checkNoMarks(text: string, file: string): void {
	if (text.search(anyMark) >= 0)
		throw new UserError(`The chat template ${file} has noncharacters of Unicode (U+FDD0 to U+FDEF).`);
}
