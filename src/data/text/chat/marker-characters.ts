/**
 * Marker characters in a rendered conversation for what its text cannot express: special tokens that are the data's own text,
 * places of images, parts in the loss. They are Unicode noncharacters, which no text may contain.
 */
import { UserError } from "../../../system/errors.ts";
import { TextTrie } from "../text-trie.ts";

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
	readonly #specials: TextTrie;

	/** `specials`: texts that stand for themselves in data. */
	constructor(specials: readonly string[]) {
		this.#specials = new TextTrie(specials);
	}

	/** A text with its special tokens marked, and broken where it ends in the beginning of one. */
	text(data: string): string {
		const plain = data.replace(anyMark, "\ufffd");
		return this.#marked(plain) + (this.#specials.endsInBeginning(plain) ? marks.dataBegin : "");
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
		return this.#specials.replace(plain, (token) => `${marks.dataBegin}${token}${marks.dataEnd}`);
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
