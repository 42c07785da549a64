/**
 * Finds any of many texts in a text, in time that does not grow with their number: tokenizers of speech have tens of thousands of
 * special tokens, more than a regular expression takes.
 */
interface Node {
	/** By UTF-16 code unit; null: no longer text begins so. */
	next: Map<number, Node> | null;
	isEnd: boolean;
}

export interface Piece {
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
