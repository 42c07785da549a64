/** A tokenizer of pieces: special tokens apart, and a codec for the text between them. */
import { TextTrie } from "./text-trie.ts";
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
