/** Splits of indexed data, alone or blended, as Megatron builds them (megatron/core/datasets/blended_megatron_dataset_builder.py). */
import { existsSync } from "node:fs";
import { UserError } from "../../system/errors.ts";
import { MersenneTwister, seedByInteger } from "../energon/random/mersenne-twister.ts";
import type { TokenSource } from "../text/token-source.ts";
import { IndexedFile } from "./indexed-file.ts";

/** The part that is taken of a blend's files. */
export interface SplitOptions {
	/** Part of every file, in shares of its sequences. */
	readonly bounds: readonly [begin: number, end: number];
	/** Samples that are wanted at least; null: those of one epoch. */
	readonly samples: number | null;
	/** Whether the blend is of this split alone: a weight beside a single data set then has no effect. */
	readonly ownBlend: boolean;
	/** The split's name in messages. */
	readonly name: string;
}

export interface ReadingOptions {
	readonly sequenceLength: number;
	readonly vocabularySize: number;
	readonly seed: number;
	/** Share of a data set's samples in a blend that is built beyond those that its weight asks for. */
	readonly surplus: number;
}

/** Most data sets of a blend, whose numbers have 16 bits. */
const MOST_SETS = 32_766;

/** The files of a run's indexed data, each opened once for all splits. */
export class IndexedFiles implements Disposable {
	readonly #files = new Map<string, IndexedFile>();

	constructor(private readonly reading: ReadingOptions) {}

	/** The samples of a split. Throws a UserError for damaged files, and for data that give fewer samples than are wanted. */
	split({ prefixes, weights }: Blend, options: SplitOptions): TokenSource {
		const { samples: wanted, ownBlend, name } = options;
		if (prefixes.length === 1 && (weights === null || ownBlend)) return this.#single(prefixes[0]!, options, wanted);
		if (prefixes.length > MOST_SETS) {
			throw new UserError(`The ${name} data blend ${prefixes.length} sets; at most ${MOST_SETS} are read.`);
		}
		if (weights === null) {
			const sets = prefixes.map((prefix) => this.#single(prefix, options, null));
			const counts = sets.map(({ samples }) => samples);
			const all = counts.reduce((sum, count) => sum + count, 0);
			if (wanted !== null && wanted > all) {
				throw new UserError(
					`The ${name} data have ${all} samples, because a blend without weights gives every set once; the run takes ${wanted}.`,
				);
			}
			return this.#blended(sets, normalised(counts), wanted ?? all, options);
		}
		if (wanted === null) {
			throw new UserError(`The ${name} data are blended by weight, without an end; one pass over them has no length.`);
		}
		const shares = normalised(weights);
		const built = samplesOfEach(shares, wanted, this.reading.surplus);
		const sets = prefixes.map((prefix, i) => this.#single(prefix, options, built[i]!));
		const size = samplesOfEach(shares, wanted, 0).reduce((sum, count) => sum + count, 0);
		return this.#blended(sets, normalised(shares), size, options);
	}

	[Symbol.dispose](): void {
		for (const file of this.#files.values()) file[Symbol.dispose]();
		this.#files.clear();
	}

	#single(prefix: string, { bounds, name }: SplitOptions, samples: number | null): TokenSource {
		const file = this.#files.get(prefix) ?? IndexedFile.open(prefix);
		this.#files.set(prefix, file);
		const [first, end] = bounds.map((share) => roundHalfToEven(share * file.lengths.length)) as [number, number];
		const { seed, sequenceLength } = this.reading;
		const order = sampleOrder(file.lengths, {
			...{ first, end, sequenceLength, samples, seed },
			name: `The ${name} part of ${prefix}`,
		});
		return {
			samples: order.shuffled.length,
			sequenceLength,
			sample: (index) => this.#read(file, order, index),
		};
	}

	#blended(sets: readonly TokenSource[], shares: readonly number[], size: number, { name }: SplitOptions): TokenSource {
		const order: BlendOrder = blendBySize(shares, size);
		for (let i = 0; i < size; i++) {
			const set = order.sets[i]!;
			if (order.samples[i]! < sets[set]!.samples) continue;
			throw new UserError(
				`Sample ${i} of the ${name} data would be sample ${order.samples[i]} of set ${set + 1}, which has ${sets[set]!.samples}; a larger mid-level-dataset-surplus than ${this.reading.surplus} builds more.`,
			);
		}
		return {
			samples: size,
			sequenceLength: this.reading.sequenceLength,
			sample: (index) => sets[order.sets[index]!]!.sample(order.samples[index]!),
		};
	}

	/** The S + 1 tokens of a sample. */
	#read(file: IndexedFile, { documents, begins, shuffled }: SampleOrder, index: number): Int32Array {
		const { sequenceLength, vocabularySize } = this.reading;
		const sample = shuffled[index];
		if (sample === undefined) throw new Error(`Sample ${index} of ${file.prefix} is beyond its ${shuffled.length}.`);
		const tokens = new Int32Array(sequenceLength + 1);
		let document = begins[2 * sample]!;
		let offset = begins[2 * sample + 1]!;
		for (let filled = 0; filled < tokens.length; document++, offset = 0) {
			const sequence = documents[document]!;
			const count = Math.min(file.lengths[sequence]! - offset, tokens.length - filled);
			if (count > 0) file.read(sequence, { offset, count, vocabularySize }, tokens, filled);
			filled += count;
		}
		return tokens;
	}
}

// The order of GPTDataset's samples (megatron/core/datasets/gpt_dataset.py and helpers.cpp): documents are shuffled epoch by epoch
// and laid one after the other, samples of S + 1 tokens that overlap by one are cut from them, and the samples are shuffled.

/** Which sequences a split takes, and how many samples it has to give. */
interface OrderOptions {
	/** Sequences first, first + 1, …, end - 1 are of the split. */
	readonly first: number;
	readonly end: number;
	readonly sequenceLength: number;
	/** Samples that are wanted at least; null: those of one epoch. */
	readonly samples: number | null;
	readonly seed: number;
	/** The data's name in messages. */
	readonly name: string;
}

interface SampleOrder {
	/** The sequences of all epochs in order. */
	readonly documents: Int32Array;
	/** Of every sample, and behind the last one: index into `documents`, and token of that sequence. [n + 1, 2]. */
	readonly begins: Int32Array;
	/** Order of the samples. */
	readonly shuffled: Uint32Array;
}

/** Most samples, whose numbers Megatron and this program draw in 32 bits. */
const MOST_SAMPLES = 2 ** 31 - 1;
/** Where fewer of an epoch's samples are wanted, the last epoch is shuffled for itself. */
const SEPARATE_BELOW = 0.8;

/** `lengths`: tokens of every sequence of the file. Throws a UserError for a split without tokens. */
function sampleOrder(lengths: Int32Array, options: OrderOptions): SampleOrder {
	const { first, end, sequenceLength, samples, name } = options;
	let tokens = 0;
	for (let i = first; i < end; i++) tokens += lengths[i]!;
	if (tokens < 2) {
		throw new UserError(`${name} has ${tokens === 0 ? "no tokens" : "one token"} in ${end - first} sequences.`);
	}
	const wanted = samples === null ? 0 : samples * sequenceLength + 1;
	const epochs = Math.max(1, Math.ceil(wanted / tokens));
	const count = Math.floor((epochs * tokens - 1) / sequenceLength);
	const ofOneEpoch = Math.floor((tokens - 1) / sequenceLength);
	const beforeLast = Math.floor(((epochs - 1) * tokens - 1) / sequenceLength);
	const separate = epochs > 1 && samples! - beforeLast < Math.trunc(SEPARATE_BELOW * ofOneEpoch);
	if (count > MOST_SAMPLES || epochs * (end - first) > MOST_SAMPLES) {
		throw new UserError(`${name} makes ${count} samples of ${epochs * (end - first)} sequences, more than 2³¹.`);
	}
	const random = new MersenneTwister(seedByInteger(options.seed));
	const documents = new Int32Array(epochs * (end - first));
	for (let i = 0; i < documents.length; i++) documents[i] = first + (i % (end - first));
	const lastEpoch = documents.length - (separate ? end - first : 0);
	shuffle(documents.subarray(0, lastEpoch), random);
	shuffle(documents.subarray(lastEpoch), random);
	const begins = sampleBegins(lengths, documents, sequenceLength, count);
	const shuffled = new Uint32Array(count);
	for (let i = 0; i < count; i++) shuffled[i] = i;
	const lastSamples = separate ? beforeLast : count;
	shuffle(shuffled.subarray(0, lastSamples), random);
	shuffle(shuffled.subarray(lastSamples), random);
	return { documents, begins, shuffled };
}

/** numpy.random.RandomState.shuffle: Fisher-Yates from the end, with indices drawn by rejection under a mask. */
function shuffle(values: Int32Array | Uint32Array, random: MersenneTwister): void {
	for (let i = values.length - 1; i > 0; i--) {
		const mask = 2 ** (32 - Math.clz32(i)) - 1;
		let j = random.u32() & mask;
		while (j > i) j = random.u32() & mask;
		const kept = values[i]!;
		values[i] = values[j]!;
		values[j] = kept;
	}
}

/** Where samples begin (build_sample_idx of helpers.cpp). A sample's last token is the next one's first. */
function sampleBegins(lengths: Int32Array, documents: Int32Array, sequenceLength: number, count: number): Int32Array {
	const begins = new Int32Array(2 * (count + 1));
	let [document, offset] = [0, 0];
	for (let sample = 1; sample <= count; sample++) {
		let missing = sequenceLength + 1;
		while (missing > 0) {
			const rest = lengths[documents[document]!]! - offset;
			if (rest >= missing) {
				offset += missing - 1;
				break;
			}
			missing -= rest;
			document++;
			offset = 0;
		}
		begins[2 * sample] = document;
		begins[2 * sample + 1] = offset;
	}
	return begins;
}

// Blends of indexed data by weight (megatron/core/datasets/blended_*.py, utils.py and helpers.cpp), with numpy's rounding.

/** Prefixes of .bin and .idx files. */
export interface Blend {
	readonly prefixes: readonly string[];
	/** null: the blend has each data set once. */
	readonly weights: readonly number[] | null;
}

/** Reads the words of --data-path: prefixes, or weights and prefixes in turn. */
export function parseBlend(words: readonly string[], name: string): Blend {
	const pairs = Array.from({ length: words.length / 2 }, (_, i) => [words[2 * i]!, words[2 * i + 1]!] as const);
	const weights = pairs.map(([weight]) => (weight.trim() === "" ? Number.NaN : Number(weight)));
	if (words.length % 2 === 1 || weights.every(Number.isNaN)) return { prefixes: words, weights: null };
	const wrong = weights.findIndex((weight) => !(weight > 0 && Number.isFinite(weight)));
	if (wrong < 0) return { prefixes: pairs.map(([, prefix]) => prefix), weights };
	throw new UserError(
		`${name}: ${pairs[wrong]![0]} stands before ${pairs[wrong]![1]}, where a weight above 0 is allowed.`,
	);
}

export const splits = ["train", "valid", "test"] as const;
export type Split = (typeof splits)[number];

/** The words of each split in the text of a JSON file, where they are a list or one text. */
export function splitWords(text: string, path: string): Record<Split, readonly string[]> {
	let json: unknown;
	try {
		json = JSON.parse(text);
	} catch (error) {
		throw new UserError(`${path} is not JSON: ${(error as Error).message}.`);
	}
	const words = (split: Split) => {
		const value = (json as Partial<Record<Split, unknown>> | null)?.[split] ?? [];
		if (typeof value === "string") return wordsOf(value);
		if (Array.isArray(value)) return value.map(String);
		throw new UserError(`${path}: ${split} is neither a text nor a list of weights and paths.`);
	};
	return { train: words("train"), valid: words("valid"), test: words("test") };
}

/** Words between blanks; the path of a data set is one word even with blanks in it, and may end in .bin or .idx. */
export function wordsOf(text: string): string[] {
	const prefixOf = (word: string) => word.replace(/\.(?:bin|idx)$/, "");
	if (existsSync(`${prefixOf(text)}.idx`)) return [prefixOf(text)];
	return text.split(/\s+/).flatMap((word) => (word === "" ? [] : [prefixOf(word)]));
}

/** numpy's normalisation: values over their sum. */
function normalised(values: readonly number[]): number[] {
	const sum = numpySum(values);
	return values.map((value) => value / sum);
}

/** numpy.sum of doubles: eight partial sums, and halves of more than 128 values. */
function numpySum(values: readonly number[]): number {
	const { length } = values;
	if (length < 8) return values.reduce((sum, value) => sum + value, 0);
	if (length > 128) {
		const half = Math.floor(length / 2) - (Math.floor(length / 2) % 8);
		return numpySum(values.slice(0, half)) + numpySum(values.slice(half));
	}
	const whole = length - (length % 8);
	const [a, b, c, d, e, f, g, h] = Array.from({ length: 8 }, (_, lane) => {
		let sum = values[lane]!;
		for (let i = lane + 8; i < whole; i += 8) sum += values[i]!;
		return sum;
	}) as [number, number, number, number, number, number, number, number];
	return values.slice(whole).reduce((sum, value) => sum + value, a + b + (c + d) + (e + f + (g + h)));
}

/** Book-ends of train, valid and test, in shares of the data; null: the split is empty. */
export function splitBounds(split: string): readonly (readonly [begin: number, end: number] | null)[] {
	const given = (split.match(/[.0-9]+/g) ?? []).map(Number);
	const total = given.reduce((sum, share) => sum + share, 0);
	if (given.length > 3 || given.some(Number.isNaN) || !(total > 0)) {
		throw new UserError(`--split "${split}" is not up to three weights such as 969,30,1.`);
	}
	const shares = normalised([...given, 0, 0].slice(0, 3));
	let begin = 0;
	return shares.map((share) => {
		const bounds = [begin, begin + share] as const;
		begin = bounds[1];
		return bounds[1] > bounds[0] ? bounds : null;
	});
}

/** Python's round: halves to the even neighbour. */
function roundHalfToEven(value: number): number {
	const below = Math.floor(value);
	const rest = value - below;
	return rest < 0.5 || (rest === 0.5 && below % 2 === 0) ? below : below + 1;
}

/** Samples to build of every data set for `samples` of a blend: `surplus` is the share of it that is built beyond them. */
function samplesOfEach(weights: readonly number[], samples: number, surplus: number): number[] {
	return weights.map((weight) => Math.ceil(Math.ceil(samples * weight) * (1 + surplus)));
}

interface BlendOrder {
	/** Data set of every sample, and which of that data set's samples. */
	readonly sets: Int16Array;
	readonly samples: Uint32Array;
}

/** The data set that lags behind its weight most comes next (build_blending_indices). `weights` sum to 1. */
function blendBySize(weights: readonly number[], size: number): BlendOrder {
	const order = { sets: new Int16Array(size), samples: new Uint32Array(size) };
	const shares = Float64Array.from(weights);
	const taken = new Float64Array(weights.length);
	for (let i = 0; i < size; i++) {
		const due = Math.max(i, 1);
		let next = 0;
		let most = shares[0]! * due - taken[0]!;
		for (let set = 1; set < shares.length; set++) {
			const lag = shares[set]! * due - taken[set]!;
			if (lag > most) [most, next] = [lag, set];
		}
		order.sets[i] = next;
		order.samples[i] = taken[next]!++;
	}
	return order;
}
