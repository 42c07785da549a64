/**
 * Special tokens apart from text that looks like them. In a tokenizer.json they are strings, so that "<|im_end|>" in
 * the text of a sample would end a turn. Here their strings begin with a mark that no text has: a tokenizer read from
 * the marked file recognises them only where this program has written the mark.
 */

import { TextTrie } from "./text-trie.ts";
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
	const texts = [...contents].sort((a, b) => b.length - a.length);
	const trie = new TextTrie(texts);
	const plain = (text: string) => text.replace(marks, "\ufffd");
	return {
		texts,
		plain,
		mark: (text) => trie.replace(plain(text), (token) => MARK + token),
		unmark: (text) => text.replace(marks, ""),
	};
}
