/** A tokenizer of pieces: special tokens apart, and a codec for the text between them. */
import type { TextPart, Tokenizer } from "./tokenizer.ts";

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

interface Codec {
	readonly vocabularySize: number;
	/** Ids of special tokens by their texts. */
	readonly specials: ReadonlyMap<string, number>;
	/** Whether text files have them too; otherwise only markup does. */
	readonly recognisesInText: boolean;
	readonly endOfDocument: number | null;
	/** Ids of text without special tokens; `begins`: no special token is before it. */
	encode(text: string, begins: boolean): readonly number[];
	decode(ids: readonly number[]): string;
	/** The text of an id that is no special token; null: there is no such token. */
	textOf(id: number): string | null;
}

export function pieceTokenizer(codec: Codec): Tokenizer {
	const { specials, vocabularySize, endOfDocument } = codec;
	const trie = new TextTrie(specials.keys());
	const byId = new Map([...specials].map(([text, id]) => [id, text]));
	const encodeParts = (parts: readonly TextPart[]): Int32Array => {
		const ids: number[] = [];
		let text = "";
		let begins = true;
		const flush = () => {
			if (text === "") return;
			for (const id of codec.encode(text, begins)) ids.push(id);
			text = "";
		};
		for (const part of parts) {
			for (const piece of part.markup ? trie.cut(part.text) : [{ text: part.text, isFound: false }]) {
				if (piece.isFound) {
					flush();
					ids.push(specials.get(piece.text)!);
					begins = false;
				} else text += piece.text;
			}
		}
		flush();
		return Int32Array.from(ids);
	};
	return {
		vocabularySize,
		endOfDocument,
		beginOfText: null,
		encode: (bytes) => encodeParts([{ text: decoder.decode(bytes), markup: codec.recognisesInText }]),
		encodeParts,
		decode: (ids) => {
			let text = "";
			let run: number[] = [];
			const flush = () => {
				if (run.length > 0) text += codec.decode(run);
				run = [];
			};
			for (const id of Array.from(ids)) {
				const special = byId.get(id);
				if (special === undefined) run.push(id);
				else {
					flush();
					text += special;
				}
			}
			flush();
			return text;
		},
		specialTokens: [...specials.keys()],
		addedText: (id) => byId.get(id) ?? null,
		ordinaryText: (id) => (byId.has(id) ? null : codec.textOf(id)),
	};
}

/**
 * Finds any of many texts in a text, in time that does not grow with their number: tokenizers of speech have tens of thousands of
 * special tokens, more than a regular expression takes.
 */
interface Node {
	/** By UTF-16 code unit; null: no longer text begins so. */
	next: Map<number, Node> | null;
	isEnd: boolean;
}

interface Piece {
	readonly text: string;
	readonly isFound: boolean;
}

export class TextTrie {
	readonly #root: Node = { next: null, isEnd: false };
	#longest = 0;

	/** An empty text is left out. */
	constructor(texts: Iterable<string>) {
		for (const text of texts) {
			let node = this.#root;
			for (let i = 0; i < text.length; i++) {
				const unit = text.charCodeAt(i);
				node.next ??= new Map();
				let next = node.next.get(unit);
				if (next === undefined) {
					next = { next: null, isEnd: false };
					node.next.set(unit, next);
				}
				node = next;
			}
			node.isEnd = text !== "";
			this.#longest = Math.max(this.#longest, text.length);
		}
	}

	/** A text with each occurrence replaced; of two that begin alike the longer one counts. */
	replace(text: string, by: (found: string) => string): string {
		let result = "";
		for (const piece of this.cut(text)) result += piece.isFound ? by(piece.text) : piece.text;
		return result;
	}

	/** A text cut before and behind each occurrence; pieces are not empty. */
	*cut(text: string): Generator<Piece> {
		let written = 0;
		for (let at = 0; at < text.length; ) {
			const end = this.endAt(text, at);
			if (end > at) {
				if (at > written) yield { text: text.slice(written, at), isFound: false };
				yield { text: text.slice(at, end), isFound: true };
				written = end;
			}
			at = Math.max(end, at + 1);
		}
		if (written < text.length) yield { text: text.slice(written), isFound: false };
	}

	/** Whether a text ends in the beginning of one that is not whole. */
	endsInBeginning(text: string): boolean {
		for (let at = Math.max(0, text.length - this.#longest + 1); at < text.length; at++) {
			let node: Node | undefined = this.#root;
			for (let i = at; i < text.length && node !== undefined; i++) node = node.next?.get(text.charCodeAt(i));
			if (node !== undefined && node.next !== null) return true;
		}
		return false;
	}

	/** Where the longest occurrence that begins at a place ends; the place itself without one. */
	endAt(text: string, at: number): number {
		let end = at;
		let node: Node | undefined = this.#root;
		for (let i = at; i < text.length; i++) {
			node = node.next?.get(text.charCodeAt(i));
			if (node === undefined) break;
			if (node.isEnd) end = i + 1;
		}
		return end;
	}
}
