import { readFileSync } from "node:fs";
import { join } from "node:path";
import { openSentencePiece } from "../../../src/data/text/sentencepiece/sentencepiece.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

const golden = join(import.meta.dir, "../../golden/tokenizers");
const models = ["bpe-bytes", "unigram-bytes", "unigram-nfkc"];

export default {
	about: "SentencePiece .model, and a text through it",
	open: () => {
		const file = new FileInput();
		return {
			seeds: models.map((name) => Buffer.from(Bun.zstdDecompressSync(readFileSync(join(golden, `${name}.model.zst`))))),
			parse: (bytes) => {
				const tokenizer = openSentencePiece(file.with(bytes), { specialTokens: null });
				tokenizer.decode(tokenizer.encodeParts([{ text: "ab \u2460 é<image>\n</s>", markup: true }]));
			},
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
