/** Splits of indexed data, alone or blended, as Megatron builds them (megatron/core/datasets/blended_megatron_dataset_builder.py). */
import { UserError } from "../../system/errors.ts";
import type { TokenSource } from "../text/token-source.ts";
import { type Blend, type BlendOrder, blendBySize, normalised, roundHalfToEven, samplesOfEach } from "./blend.ts";
import { IndexedFile } from "./indexed-file.ts";
import { type SampleOrder, sampleOrder } from "./sample-order.ts";

/** What is taken of a blend's files. */
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
