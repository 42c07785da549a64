/** Checks of the keys that name a tokenizer. */
import { type Check, unless } from "./check.ts";

export const tokenizerChecks: readonly Check[] = [
	({ tokenizerType: type, tokenizer }) =>
		unless(
			type === null || type === "GPT2BPETokenizer" || type === "NullTokenizer" || tokenizer !== null,
			"tokenizer-type",
			"it needs tokenizer-model, its file",
		),
	({ tokenizerType: type, vocabFile, mergeFile }) =>
		unless(
			type !== "GPT2BPETokenizer" || (vocabFile !== null && mergeFile !== null),
			"tokenizer-type",
			"it needs vocab-file and merge-file",
		),
	({ tokenizerType: type, tokenizer, vocabFile }) =>
		unless(
			type !== null || tokenizer === null || vocabFile === null,
			"vocab-file",
			"tokenizer is given too: allowed is one of them, or tokenizer-type with both",
		),
	({ vocabFile, mergeFile }) =>
		unless(
			(vocabFile === null) === (mergeFile === null),
			"vocab-file",
			"allowed is vocab-file and merge-file together",
		),
	(c) =>
		unless(
			!c.tokenizerType?.match(/SentencePiece|Llama2/) ||
				c.tokenizerSpecialTokens === null ||
				c.tokenizerSentencepieceLegacy,
			"tokenizer-special-tokens",
			"a SentencePiece model takes them only with tokenizer-sentencepiece-legacy",
		),
	({ nullTokenizerEodId: id, vocabSize }) =>
		unless(id === null || id < vocabSize, "null-tokenizer-eod-id", `allowed is less than vocab-size (${vocabSize})`),
];
