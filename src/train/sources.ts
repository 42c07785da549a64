/** The training and validation samples a configuration names. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { readTokenRows } from "../data/text/token-file.ts";
import { readTokens, rowSource, type TokenSource, windowedSource } from "../data/text/token-source.ts";
import { byteTokenizer, openTokenizer, type Tokenizer } from "../data/text/tokenizer.ts";
import { UserError } from "../native/errors.ts";

export interface Sources {
	readonly training: TokenSource;
	/** null when nothing is kept back. */
	readonly validation: TokenSource | null;
	/** Held-out bytes of a byte-level text, for their entropies; null otherwise. */
	readonly heldOutBytes: Int32Array | null;
}

export function openSources(c: TrainingConfiguration): Sources {
	switch (c.datasetProvider) {
		case "mock":
			throw new UserError("A language model without an encoder trains on files: give --data-path.");
		case "tokens":
			return tokenSources(c);
		default:
			return textSources(c);
	}
}

function tokenSources(c: TrainingConfiguration): Sources {
	const open = (path: string) => {
		const rows = readTokenRows(path, c.seqLength);
		checkVocabulary(rows, c.vocabSize, path);
		return rowSource(rows, c.seqLength);
	};
	return {
		training: open(c.dataPath!),
		validation: c.validDataPath === null ? null : open(c.validDataPath),
		heldOutBytes: null,
	};
}

function textSources(c: TrainingConfiguration): Sources {
	const tokenizer: Tokenizer = c.tokenizer === null ? byteTokenizer : openTokenizer(c.tokenizer);
	const tokens = readTokens(c.dataPath!, tokenizer);
	checkVocabulary(tokens, c.vocabSize, c.dataPath!);
	const [trainingShare, validationShare] = shares(c.split);
	const trainingEnd = c.validDataPath === null ? Math.floor(tokens.length * trainingShare) : tokens.length;
	const heldOut =
		c.validDataPath === null
			? tokens.subarray(trainingEnd, Math.floor(tokens.length * (trainingShare + validationShare)))
			: readTokens(c.validDataPath, tokenizer);
	const heldOutName = c.validDataPath ?? `the part of ${c.dataPath} that split keeps back`;
	const training = windowedSource(tokens.subarray(0, trainingEnd), c.seqLength, c.seed, c.dataPath!);
	// A remainder too short for one sample is no validation set, unless evaluation was asked for.
	const wanted = heldOut.length > c.seqLength || c.evalIters > 0 || c.validDataPath !== null;
	return {
		training,
		validation: wanted ? windowedSource(heldOut, c.seqLength, null, heldOutName) : null,
		heldOutBytes: tokenizer === byteTokenizer && heldOut.length > 1 ? heldOut : null,
	};
}

/** Megatron's --split: weights of training, validation and test, as fractions of their sum. */
function shares(split: string): [number, number] {
	const weights = split.split(",").map(Number);
	const total = weights.reduce((sum, weight) => sum + weight, 0);
	if (weights.length > 3 || weights.some((weight) => !(weight >= 0)) || !(total > 0)) {
		throw new UserError(`--split "${split}" is not up to three weights such as 969,30,1.`);
	}
	return [(weights[0] ?? 0) / total, (weights[1] ?? 0) / total];
}

function checkVocabulary(tokens: Int32Array, vocabularySize: number, path: string): void {
	const at = tokens.findIndex((id) => id < 0 || id >= vocabularySize);
	if (at >= 0) {
		throw new UserError(
			`Token ${at} of ${path} is ${tokens[at]}, outside the vocabulary of vocab-size ${vocabularySize}.`,
		);
	}
}
