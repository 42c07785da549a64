import { openTokenizer } from "../../../src/data/text/tokenizer.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

const token = { normalized: false, lstrip: false, rstrip: false, single_word: false };
const byteLevel = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true };
const seed = {
	added_tokens: [{ ...token, id: 4, content: "<e>", special: true }],
	normalizer: null,
	pre_tokenizer: byteLevel,
	post_processor: null,
	decoder: byteLevel,
	model: { type: "BPE", unk_token: null, vocab: { a: 0, b: 1, ab: 2, "\u0120": 3 }, merges: ["a b"] },
};

export default {
	about: "tokenizer.json, and a text through it",
	open: () => {
		const file = new FileInput();
		return {
			seeds: [Buffer.from(JSON.stringify(seed))],
			json: true,
			dictionary: ['"Unigram"', '"WordPiece"', '"Metaspace"', '"NFC"', '"(a*)*b"', "{}", "null", "1e9", "-1"],
			parse: (bytes) => {
				const tokenizer = openTokenizer(file.with(bytes));
				const ids = tokenizer.encodeParts([
					{ text: "ab a<e>b", markup: false },
					{ text: "<e>", markup: true },
				]);
				if (ids.length > 0) tokenizer.decode(ids);
			},
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
