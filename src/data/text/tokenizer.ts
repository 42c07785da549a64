/** Text to token ids: bytes as they are, or a Hugging Face tokenizer.json. */
import { readFileSync } from "node:fs";
import { Tokenizer as HuggingFaceTokenizer } from "@huggingface/tokenizers";
import { UserError } from "../../native/errors.ts";

export interface Tokenizer {
	/** One more than the largest id. */
	readonly vocabularySize: number;
	encode(text: Uint8Array): Int32Array;
	decode(ids: ArrayLike<number>): string;
}

/** 256 ids, one a byte. */
export const byteTokenizer: Tokenizer = {
	vocabularySize: 256,
	encode: (text) => Int32Array.from(text),
	decode: (ids) => new TextDecoder().decode(Uint8Array.from(Array.from(ids))),
};

/** Reads a tokenizer.json. Special tokens are not added to what is encoded. */
export function openTokenizer(path: string): Tokenizer {
	let parsed: { model?: { vocab?: unknown } };
	try {
		parsed = JSON.parse(readFileSync(path, "utf8")) as typeof parsed;
	} catch (error) {
		throw new UserError(`The tokenizer file ${path} cannot be read: ${(error as Error).message}.`);
	}
	const inner = new HuggingFaceTokenizer(parsed as never, {} as never);
	const vocabularySize = Math.max(...[...inner.get_vocab().values()].map(Number)) + 1;
	return {
		vocabularySize,
		encode: (text) => Int32Array.from(inner.encode(new TextDecoder().decode(text), { add_special_tokens: false }).ids),
		decode: (ids) => inner.decode(Array.from(ids), { skip_special_tokens: false }),
	};
}
