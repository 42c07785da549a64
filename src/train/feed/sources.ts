/** Opens the training and validation data that a configuration names. */
import { openSafetensors } from "../../checkpoint/index.ts";
import { hasEncoder } from "../../config/derive.ts";
import { modulesOf } from "../../config/modules.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { refuseMockText } from "../../data/check.ts";
import { noImages } from "../../data/images.ts";
import { openIndexedText } from "../../data/megatron/from-configuration.ts";
import { type Microbatch, nextTokenMicrobatch, noText } from "../../data/microbatch.ts";
import { datasetSeed, mockData } from "../../data/mock.ts";
import { timeoutOf } from "../../data/routing/from-configuration.ts";
import { configuredTokenizer } from "../../data/text/configured-tokenizer.ts";
import { readTokens, rowSource, type TokenSource, windowedSource } from "../../data/text/token-source.ts";
import { byteTokenizer } from "../../data/text/tokenizer.ts";
import { ReadGuard } from "../../native/files.ts";
import type { Group } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { type EncoderKind, encoderKinds } from "../encoder-kinds.ts";
import type { DataPlace, RunData } from "./batch-source.ts";
import { energonSources } from "./energon-source.ts";
import { endlessEvaluation, type IndexedData, indexedEvaluation, indexedTraining } from "./indexed-source.ts";
import type { Lane } from "./shared-batches.ts";

/** Inputs of opening a run's data beside the configuration. */
export interface DataOptions {
	/** Every rank of the run. */
	readonly world: Group;
	/** The ranks that take the same microbatches as this rank. */
	readonly lane: Lane;
	/** States of a saved run's data (BatchSource.save), by rank; null: this run starts anew. */
	readonly states: readonly unknown[] | null;
	/** Hears why a skipped sample could not be written to the list of them; absent: a warning. */
	readonly onUnlisted?: (sentence: string) => void;
	/** Samples that the saved run's evaluations have used. */
	readonly consumedValidSamples: number;
}

/** Opens the data that this rank reads. */
export async function openSources(c: TrainingConfiguration, place: DataPlace, options: DataOptions): Promise<RunData> {
	switch (c.datasetProvider) {
		case "energon":
			return await energonSources(c, place, options);
		case "mock":
			refuseMockText(c);
			return mockSources(c, place, options.consumedValidSamples);
		case "tokens":
			return textOnly(c, place, tokenSources(c));
		case "indexed":
			return indexedText(c, place, options.consumedValidSamples);
		default:
			return textOnly(c, place, textSources(c));
	}
}

function mockSources(c: TrainingConfiguration, place: DataPlace, consumedValidSamples: number): RunData {
	return {
		training: indexedTraining(c, place, withFeatures(c, mockData(c, "train"), "train")),
		validation:
			c.evalIters > 0
				? endlessEvaluation(c, place, withFeatures(c, mockData(c, "valid"), "valid"), consumedValidSamples)
				: null,
		heldOutBytes: null,
	};
}

/** Megatron's indexed data: samples of text alone, dealt to lanes in turn. */
function indexedText(c: TrainingConfiguration, place: DataPlace, consumedValidSamples: number): RunData {
	const timeout = timeoutOf(c);
	using _ = new ReadGuard(timeout);
	const text = openIndexedText(c);
	const documents = { end: text.endId, maskEnds: c.eodMaskLoss, separate: c.resetAttentionMask };
	const dataOf = (source: TokenSource, split: "train" | "valid") => {
		const sample = (index: number) => {
			using _ = new ReadGuard(timeout);
			return source.sample(index);
		};
		const rows = indexedTokens({ ...source, sample }, (read) => documentMicrobatch(read, documents));
		return withFeatures(c, rows, split);
	};
	const endless = (source: TokenSource | null, consumed: number) =>
		source && endlessEvaluation(c, place, dataOf(source, "valid"), consumed, "turns");
	const whole = (source: TokenSource) => {
		const held = { samples: source.samples, whole: hasEncoder(c) || c.modules.length > 0 };
		const evaluation = indexedEvaluation(c, place, dataOf(source, "valid"), held);
		return { microbatches: () => evaluation.microbatches(null) };
	};
	const { validation } = text;
	return {
		training: {
			...indexedTraining(c, place, dataOf(text.training, "train"), "turns"),
			close: async () => text[Symbol.dispose](),
		},
		validation: validation && c.fullValidation ? whole(validation) : endless(validation, consumedValidSamples),
		test: endless(text.test, 0),
		heldOutBytes: null,
	};
}

interface TokenSources {
	readonly training: TokenSource;
	readonly validation: TokenSource | null;
	readonly heldOutBytes: Int32Array | null;
}

/** Rows of tokens: samples of text alone. */
function textOnly(c: TrainingConfiguration, place: DataPlace, sources: TokenSources): RunData {
	const { training, validation, heldOutBytes } = sources;
	const held = { samples: validation?.samples ?? 0, whole: hasEncoder(c) || c.modules.length > 0 };
	return {
		training: indexedTraining(c, place, withFeatures(c, indexedTokens(training), "train")),
		validation: validation && indexedEvaluation(c, place, withFeatures(c, indexedTokens(validation), "valid"), held),
		heldOutBytes,
	};
}

/** Data with what the encoders of `modules` read beside them; their placeholder tokens are no labels. */
function withFeatures(c: TrainingConfiguration, data: IndexedData, split: "train" | "valid"): IndexedData {
	const modules = modulesOf(c);
	if (modules.length === 0) return data;
	const placeholders = new Set(modules.map(({ placeholderTokenId }) => placeholderTokenId));
	const readers = modules.map((module) => {
		const byLane = new Map<number, ReturnType<EncoderKind["open"]>>();
		const open = (lane: number) => {
			const known =
				byLane.get(lane) ?? encoderKinds[module.kind].open(module, datasetSeed(c.seed, "encoder", lane, split));
			byLane.set(lane, known);
			return known;
		};
		return { name: module.name, stored: module.dataPath !== null, open };
	});
	return {
		microbatch: (range, wants) => {
			const { text, features } = data.microbatch(range, wants);
			const more = readers
				.filter(({ name }) => name in wants.features)
				.map(({ name, stored, open }) => {
					// A file has the run's samples in order; drawn input is a lane's own, as mock text is.
					const read = stored ? open(0)(range.first, range.count) : open(range.lane)(range.firstOfLane, range.count);
					return [name, read] as const;
				});
			const counts = (label: number) => !placeholders.has(label);
			return {
				text: {
					...text,
					labels: text.labels.map((label) => (counts(label) ? label : -100)),
					lossMask: text.lossMask.map((mask, at) => (counts(text.labels[at]!) ? mask : 0)),
				},
				features: { ...features, ...Object.fromEntries(more) },
			};
		},
	};
}

function indexedTokens(source: TokenSource, toText = nextTokenMicrobatch): IndexedData {
	return {
		microbatch: ({ first, count }, { wantsText, features }) => ({
			text: wantsText ? toText(Array.from({ length: count }, (_, row) => source.sample(first + row))) : noText,
			features: Object.fromEntries(Object.keys(features).map((module) => [module, noImages(count)])),
		}),
	};
}

/** Sources of a .safetensors file of tokens. */
export function tokenSources(c: TrainingConfiguration): TokenSources {
	using _ = new ReadGuard(timeoutOf(c));
	const open = (path: string) => rowSource(readTokenRows(path, c.seqLength, c.vocabSize), c.seqLength);
	return {
		training: open(c.dataPath!),
		validation: c.validDataPath === null ? null : open(c.validDataPath),
		heldOutBytes: null,
	};
}

/** Sources of a text file, which is read whole. */
export function textSources(c: TrainingConfiguration): TokenSources {
	using _ = new ReadGuard(timeoutOf(c));
	const tokenizer = configuredTokenizer(c);
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
	// A remainder shorter than one sample makes no validation set; it is an error only if an evaluation was configured.
	const wanted = heldOut.length > c.seqLength || c.evalIters > 0 || c.validDataPath !== null;
	return {
		training,
		validation: wanted ? windowedSource(heldOut, c.seqLength, null, heldOutName) : null,
		heldOutBytes: tokenizer === byteTokenizer && heldOut.length > 1 ? heldOut : null,
	};
}

/** Megatron's --split: fractions of training and validation data. */
function shares(split: string): [number, number] {
	const weights = split.split(",").map(Number);
	const total = weights.reduce((sum, weight) => sum + weight, 0);
	if (weights.length > 3 || weights.some((weight) => !(weight >= 0)) || !(total > 0)) {
		throw new UserError(`--split "${split}" is not up to three weights such as 969,30,1.`);
	}
	return [(weights[0] ?? 0) / total, (weights[1] ?? 0) / total];
}

// Ready-made token rows: the tensor `tokens` of a safetensors file.

/**
 * Rows of S + 1 token ids: i32 or i64 [..., S + 1], all leading dimensions taken as samples in order. Throws a UserError
 * for an id outside the vocabulary.
 */
export function readTokenRows(path: string, sequenceLength: number, vocabularySize: number): Int32Array {
	using file = openSafetensors(path);
	const { dtype, shape } = file.information("tokens");
	if (dtype !== "I32" && dtype !== "I64") {
		throw new UserError(`tokens in ${path} is ${dtype}; token ids are I32 or I64.`);
	}
	if (shape.at(-1) !== sequenceLength + 1 || shape.length < 2) {
		throw new UserError(
			`tokens in ${path} has shape [${shape.join(", ")}]; seq-length ${sequenceLength} needs [samples, ${sequenceLength + 1}].`,
		);
	}
	const values = file.read("tokens");
	if (values.length === 0) throw new UserError(`tokens in ${path} holds no samples.`);
	// 64-bit ids are compared before they are cut to 32 bits.
	checkVocabulary(values as Int32Array | BigInt64Array, vocabularySize, path);
	return values instanceof Int32Array ? values : Int32Array.from(values as BigInt64Array, Number);
}

/** Throws a UserError that names the first token outside the vocabulary of the file `path`. */
function checkVocabulary(tokens: Int32Array | BigInt64Array, vocabularySize: number, path: string): void {
	const most = tokens instanceof Int32Array ? vocabularySize : BigInt(vocabularySize);
	for (let i = 0; i < tokens.length; i++) {
		const id = tokens[i]!;
		if (id >= 0 && id < most) continue;
		throw new UserError(`Token ${i} of ${path} is ${id}, outside the vocabulary of vocab-size ${vocabularySize}.`);
	}
}

// Rows of S + 1 tokens of several documents as a microbatch (_get_ltor_masks_and_position_ids of megatron/core/datasets/gpt_dataset.py).

interface DocumentOptions {
	/** Token that ends a document; null: documents are not told apart. */
	readonly end: number | null;
	/** Leaves the label after a document's end, which begins the next document, out of the loss. */
	readonly maskEnds: boolean;
	/** Makes a row's documents sequences of their own: they see nothing of each other, and their positions begin at 0. */
	readonly separate: boolean;
}

export function documentMicrobatch(rows: readonly Int32Array[], options: DocumentOptions): Microbatch {
	const { end, maskEnds, separate } = options;
	const plain = nextTokenMicrobatch(rows);
	const { ids, lossMask } = plain;
	if (maskEnds) for (let i = 0; i < ids.length; i++) if (ids[i] === end) lossMask[i] = 0;
	if (!separate) return plain;
	const lengths: number[] = [];
	let begin = 0;
	let rowEnd = 0;
	for (const length of plain.lengths) {
		rowEnd += length;
		for (let i = begin; i < rowEnd; i++) {
			if (ids[i] !== end && i < rowEnd - 1) continue;
			lengths.push(i + 1 - begin);
			begin = i + 1;
		}
	}
	return { ...plain, lengths, samples: plain.lengths };
}
