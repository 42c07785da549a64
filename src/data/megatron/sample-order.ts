/**
 * The order of GPTDataset's samples (megatron/core/datasets/gpt_dataset.py and helpers.cpp): documents are shuffled epoch by epoch
 * and laid one after the other, samples of S + 1 tokens that overlap by one are cut from them, and the samples are shuffled.
 */
import { UserError } from "../../system/errors.ts";
import { MersenneTwister, seedByInteger } from "../energon/random/mersenne-twister.ts";

/** Which sequences a split takes, and how many samples it has to give. */
export interface OrderOptions {
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

export interface SampleOrder {
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
export function sampleOrder(lengths: Int32Array, options: OrderOptions): SampleOrder {
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
