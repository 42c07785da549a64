/** How text becomes token ids, by Megatron's names. */
import { choice, defaulting, integer, list, off, optional, path, text } from "../field.ts";

export const tokenizerKeys = {
	tokenizer: optional(
		path,
		"A tokenizer.json, a folder with one, or the file that tokenizer-type asks for; unset: bytes.",
		{ aliases: ["tokenizer-model"] },
	),
	"tokenizer-type": optional(
		choice(
			[
				"HuggingFaceTokenizer",
				"MultimodalTokenizer",
				"GPT2BPETokenizer",
				"TikTokenizer",
				"SentencePieceTokenizer",
				"GPTSentencePieceTokenizer",
				"Llama2Tokenizer",
				"NullTokenizer",
			],
			["BertWordPieceLowerCase", "BertWordPieceCase", "NullMultimodalTokenizer", "SFTTokenizer"],
		),
		"HuggingFaceTokenizer and MultimodalTokenizer: a tokenizer.json. GPT2BPETokenizer: vocab-file and merge-file. TikTokenizer: a JSON list of byte strings. SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer: a SentencePiece .model. NullTokenizer: text that consists of ids. Unset: as the files say.",
	),
	"vocab-file": optional(path, "vocab.json of GPT2BPETokenizer: ids by token."),
	"merge-file": optional(path, "merges.txt of GPT2BPETokenizer: pairs in the order in which they are merged."),
	"tokenizer-special-tokens": optional(
		list(text),
		"Special tokens beside those of the tokenizer's files; TikTokenizer: instead of <unk>, <s>, </s>, <mask>, <pad>, <cls> and <sep>, which have to be among them.",
		{ aliases: ["special-tokens"] },
	),
	"tokenizer-hf-no-include-special-tokens": off(
		"With tokenizer-type HuggingFaceTokenizer, leave out the tokens that the tokenizer puts around a text.",
	),
	"tokenizer-sentencepiece-legacy": off(
		"Recognise tokenizer-special-tokens in text, those that the SentencePiece model lacks with ids behind its own.",
	),
	"tiktoken-pattern": defaulting(choice(["v1", "v2"]), "v2", "How TikTokenizer splits text."),
	"tiktoken-num-special-tokens": defaulting(integer(7), 1000, "First ids of TikTokenizer, which are special tokens."),
	"null-tokenizer-eod-id": optional(integer(0), "End of a document in NullTokenizer; unset: vocab-size less one."),
} as const;
