/**
 * Special tokens apart from text that looks like them. In a tokenizer.json they are strings, so that "<|im_end|>" in
 * the text of a sample would end a turn. Here their strings begin with a mark that no text has: a tokenizer read from
 * the marked file recognises them only where this program has written the mark.
 */

import type { TokenizerFile } from "./tokenizer-file.ts";

/** A code point that is assigned to no character, for internal use. */
const MARK = "\u{10ffff}";
const marks = /\u{10ffff}/gu;

export interface SpecialTokens {
	readonly texts: readonly string[];
	/** The text with every special token in it marked. */
	mark(text: string): string;
	/** The text with none. */
	plain(text: string): string;
	/** Removes the marks from text that a tokenizer of the marked file has decoded. */
	unmark(text: string): string;
}

/** Marks the special tokens of a tokenizer.json in place. */
export function markSpecialTokens(file: TokenizerFile): SpecialTokens {
	const special = (file.added_tokens ?? []).filter((token) => token.special === true);
	const contents = new Set(special.map(({ content }) => content));
	for (const token of special) token.content = MARK + token.content;
	const { model } = file;
	if (Array.isArray(model.vocab)) {
		for (const entry of model.vocab) if (contents.has(entry[0])) entry[0] = MARK + entry[0];
	} else if (model.vocab) {
		// Tokens that merges make from text are text, even where a special token is spelled the same.
		const merged = new Set(
			(model.merges ?? []).map((pair) => (typeof pair === "string" ? pair.replace(" ", "") : pair.join(""))),
		);
		for (const content of contents) {
			const id = model.vocab[content];
			if (id === undefined) continue;
			if (!merged.has(content)) delete model.vocab[content];
			model.vocab[MARK + content] = id;
		}
	}
	if (typeof model.unk_token === "string" && contents.has(model.unk_token)) model.unk_token = MARK + model.unk_token;
	const texts = [...contents].filter((content) => content !== "").sort((a, b) => b.length - a.length);
	const root = trieOf(texts);
	const plain = (text: string) => text.replace(marks, "\ufffd");
	return {
		texts,
		plain,
		mark: (text) => marked(plain(text), root),
		unmark: (text) => text.replace(marks, ""),
	};
}

/** A node of the texts' trie: tokenizers of speech have tens of thousands, too many for a regular expression. */
interface Node {
	/** By UTF-16 code unit. */
	readonly next: Map<number, Node>;
	isEnd: boolean;
}

function trieOf(texts: readonly string[]): Node {
	const root: Node = { next: new Map(), isEnd: false };
	for (const text of texts) {
		let node = root;
		for (let i = 0; i < text.length; i++) {
			const unit = text.charCodeAt(i);
			let next = node.next.get(unit);
			if (next === undefined) {
				next = { next: new Map(), isEnd: false };
				node.next.set(unit, next);
			}
			node = next;
		}
		node.isEnd = true;
	}
	return root;
}

/** The text with a mark before every token. */
function marked(text: string, root: Node): string {
	let result = "";
	let written = 0;
	for (let at = 0; at < text.length; ) {
		const end = endOfToken(text, at, root);
		if (end > at) {
			result += `${text.slice(written, at)}${MARK}${text.slice(at, end)}`;
			written = end;
		}
		at = Math.max(end, at + 1);
	}
	return result + text.slice(written);
}

/** Where the longest token that begins at a place ends; the place itself where there is none. */
function endOfToken(text: string, at: number, root: Node): number {
	let end = at;
	let node: Node | undefined = root;
	for (let i = at; i < text.length; i++) {
		node = node.next.get(text.charCodeAt(i));
		if (node === undefined) break;
		if (node.isEnd) end = i + 1;
	}
	return end;
}
