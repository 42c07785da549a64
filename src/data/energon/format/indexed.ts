/**
 * Megatron's indexed text beside other samples (docs/spec/energon.md §1.7): a data set PREFIX.bin with its PREFIX.idx, and McoreBlend, a
 * metadataset whose JSON file lists weights and such data sets for every split.
 */
import { UserError } from "../../../system/errors.ts";
import { IndexedFile } from "../../megatron/indexed-file.ts";
import { parseBlend, splitWords } from "../../megatron/splits.ts";
import { FatalSampleError } from "../errors.ts";
import type { RawSample } from "../sample.ts";
import { folderOf, nameOf, resolvePath } from "../storage/storage.ts";
import type { SampleReader } from "../wrappers/sample-loader.ts";

/** The part of a sample that holds its ids, 32-bit integers: those of the input, and behind them the last one's next. */
export const tokenPart = "tokens";

/** Token ids have 31 bits; the task knows the vocabulary. */
const ANY_ID = 2 ** 31;

/** Pieces of the documents of a .bin file. A token that has no next one in its document begins no piece. */
export class IndexedReader implements SampleReader {
	readonly length: number;
	readonly #file: IndexedFile;
	/** Number of pieces before each document, and of all. */
	readonly #before: Float64Array;

	/** `tokens`: most input tokens of a piece; null: whole documents. Throws a UserError for damaged files. */
	constructor(
		readonly path: string,
		private readonly tokens: number | null,
	) {
		this.#file = IndexedFile.open(path.replace(/\.bin$/, ""));
		const { lengths } = this.#file;
		this.#before = new Float64Array(lengths.length + 1);
		for (let i = 0; i < lengths.length; i++) {
			const inputs = Math.max(0, lengths[i]! - 1);
			this.#before[i + 1] = this.#before[i]! + (tokens === null ? Math.min(1, inputs) : Math.ceil(inputs / tokens));
		}
		this.length = this.#before.at(-1)!;
	}

	read(index: number): RawSample {
		if (index < 0 || index >= this.length) {
			throw new FatalSampleError(`There is no sample ${index} in ${this.path}; it has ${this.length}.`);
		}
		const document = this.#documentOf(index);
		const offset = (index - this.#before[document]!) * (this.tokens ?? 0);
		const count = Math.min(this.#file.lengths[document]! - offset, (this.tokens ?? Number.POSITIVE_INFINITY) + 1);
		const ids = new Int32Array(count);
		this.#file.read(document, { offset, count, vocabularySize: ANY_ID }, ids, 0);
		const key = String(index);
		const shard = nameOf(this.path);
		return {
			...{ key, shard, sources: [{ datasetPath: this.path, index, shardName: shard, fileNames: [shard] }] },
			parts: new Map([[tokenPart, new Uint8Array(ids.buffer)]]),
		};
	}

	/** The last document with at most `index` pieces before it. */
	#documentOf(index: number): number {
		let [low, high] = [0, this.#before.length - 1];
		while (high - low > 1) {
			const middle = (low + high) >> 1;
			if (this.#before[middle]! <= index) low = middle;
			else high = middle;
		}
		return low;
	}
}

/** Energon's names of splits. */
const splits = { train: "train", val: "valid", test: "test" } as const;

/** Weights and .bin files of each split that the JSON file of a McoreBlend has. Paths are relative to it. */
export function mcoreSplits(path: string, text: string): Map<string, readonly { path: string; weight: number }[]> {
	const words = splitWords(text, path);
	const named = Object.entries(splits).map(([part, split]) => {
		const { prefixes, weights } = parseBlend(words[split], `${split} in ${path}`);
		if (weights === null && prefixes.length > 0) {
			throw new UserError(`${path}: ${split} has no weights; a McoreBlend has one before each path.`);
		}
		const entries = prefixes.map((prefix, i) => ({
			path: `${resolvePath(folderOf(path), prefix.replace(/\.(?:bin|idx)$/, ""))}.bin`,
			weight: weights![i]!,
		}));
		return [part, entries] as const;
	});
	return new Map(named.filter(([, entries]) => entries.length > 0));
}
