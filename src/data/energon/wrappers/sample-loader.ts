/**
 * The leaf of a pipeline, which reads the samples of a dataset in training order (docs/spec/energon.md §3.3): slices are shuffled
 * over epochs, several slices are open at once, and each sample is from an open slice, drawn by size.
 */
import { BrokenSampleError, ErrorContext, FatalSampleError } from "../errors.ts";
import { DEFAULT_TOLERANCE } from "../hook.ts";
import type { TorchGenerator } from "../random/torch-generator.ts";
import { cumulative } from "../random/torch-generator.ts";
import type { RawRecord, RawSample, RestoreKey } from "../sample.ts";
import type { Worker } from "../worker.ts";
import { Dataset, generatorField, type StateFields, type StateValue } from "./dataset.ts";

/** First entry of the restore key of a joined sample. */
export const JOINED = "JoinedWebdatasetFactory";

/** Random access to the samples of a split part. */
export interface SampleReader {
	/** Sample `index`; null if it is excluded. Throws a BrokenSampleError if the shard is damaged. */
	read(index: number): RawSample | null;
}

export interface SampleLoaderOptions {
	readonly readers: readonly SampleReader[];
	/** Slice offsets of every worker of the rank. */
	readonly sliceOffsets: readonly (readonly number[])[];
	/** null: in order; k ≥ 1: without replacement over k epochs; -1: with replacement, endlessly. */
	readonly shuffleOverEpochs: number | null;
	/** Number of slices that are open at once. */
	readonly parallelSlices: number;
}

interface OpenSlice {
	readonly index: number;
	current: number;
}

/** Most slices in an epoch of a worker, whose order is held in memory. */
const MOST_SLICES = 100_000_000;

export class SampleLoaderDataset extends Dataset<RawRecord> {
	readonly className = "WebdatasetSampleLoaderDataset";
	readonly #options: SampleLoaderOptions;
	readonly #offsets: readonly number[];
	readonly #errors: ErrorContext;
	#generator: TorchGenerator;
	/** Slices of this epoch that are not open yet, the next slice last; null between epochs. */
	#pending: number[] | null = null;
	/** Slices taken from the pending list in this epoch. */
	#pendingOffset: number | null = null;
	#open: (OpenSlice | null)[];
	#sampleCount = 0;
	#epochCount = 0;
	#epochSampleCount = 0;

	constructor(worker: Worker, options: SampleLoaderOptions) {
		super(worker, []);
		this.#options = options;
		this.#offsets = options.sliceOffsets[worker.id]!;
		const slices = (this.#offsets.length - 1) * Math.max(1, options.shuffleOverEpochs ?? 1);
		if (slices > MOST_SLICES) {
			throw new FatalSampleError(
				`shuffle_over_epochs ${options.shuffleOverEpochs} makes ${slices} slices an epoch, more than ${MOST_SLICES}.`,
			);
		}
		this.#errors = new ErrorContext("reading", worker.config.errorHandler, DEFAULT_TOLERANCE);
		this.#generator = worker.generator();
		this.#open = new Array(options.parallelSlices).fill(null);
	}

	override hasSamples(): boolean {
		return this.#offsets.length > 1;
	}

	override lengthOfWorker(worker: number): number {
		const offsets = this.#options.sliceOffsets[worker]!;
		return offsets[offsets.length - 1]! - offsets[0]!;
	}

	override *iterate(): Generator<RawRecord, void, void> {
		if (!this.hasSamples()) return;
		const { shuffleOverEpochs, parallelSlices } = this.#options;
		const resumed = this.#open.some((slice) => slice !== null) || this.#pendingOffset !== null;
		if (!resumed) this.#beginEpoch();
		if (this.#open.length !== parallelSlices) {
			throw new FatalSampleError(
				`The loader state has ${this.#open.length} parallel shard iterators; this run has ${parallelSlices}.`,
			);
		}
		if (shuffleOverEpochs === null && parallelSlices !== 1) {
			throw new FatalSampleError(`Without shuffling there is one shard iterator, not ${parallelSlices}.`);
		}
		const pending = this.#pending!;
		const weights = Float32Array.from(this.#open, (slice) => (slice === null ? 0 : this.#sizeOf(slice.index)));
		let sums = cumulative(weights);
		while (sums[sums.length - 1]! > 0) {
			const chosen = shuffleOverEpochs === null || weights.length === 1 ? 0 : this.#generator.choiceByCumulative(sums);
			const slice = this.#open[chosen];
			// A draw of exactly 0 selects an empty first entry (docs/spec/energon.md §3.2), which has no sample.
			if (slice == null) throw new FatalSampleError("The generator drew a shard iterator that has no slice.");
			const index = slice.current;
			const data = this.#read(index);
			slice.current++;
			this.#sampleCount++;
			this.#epochSampleCount++;
			if (slice.current >= this.#offsets[slice.index + 1]!) {
				const next = this.#nextSlice(pending);
				this.#open[chosen] = next;
				weights[chosen] = next === null ? 0 : this.#sizeOf(next.index);
				sums = cumulative(weights);
			}
			if (data[0] !== null) yield { restoreKey: ["Webdataset", index], data };
		}
		this.#epochCount++;
		this.#epochSampleCount = 0;
		this.#pending = null;
		this.#pendingOffset = null;
	}

	/** A record; without data for a damaged sample, which is skipped but has been drawn. */
	#read(index: number): readonly (RawSample | null)[] {
		try {
			const data = this.#options.readers.map((reader) => reader.read(index));
			this.#errors.succeeded();
			return data;
		} catch (error) {
			// In Energon a damaged shard ends the run regardless of the handler.
			if (!(error instanceof BrokenSampleError) || this.worker.compatibility === "energon") throw error;
			this.#errors.failed(error, { key: error.key, shard: error.source.shardName, sources: [error.source] });
			return [null];
		}
	}

	#beginEpoch(): void {
		const { shuffleOverEpochs, parallelSlices } = this.#options;
		const slices = this.#offsets.length - 1;
		let order: number[];
		if (shuffleOverEpochs === null) {
			order = Array.from({ length: slices }, (_, i) => i);
		} else if (shuffleOverEpochs === -1) {
			order = Array.from({ length: parallelSlices }, () => this.#generator.below(slices));
		} else {
			order = this.#generator.permutation(slices * shuffleOverEpochs).map((i) => i % slices);
		}
		this.#pending = order.reverse();
		this.#pendingOffset = 0;
		this.#open = Array.from({ length: parallelSlices }, () =>
			this.#pending!.length > 0 ? this.#openSlice(this.#takePending()) : null,
		);
	}

	#takePending(): number {
		this.#pendingOffset!++;
		return this.#pending!.pop()!;
	}

	#nextSlice(pending: readonly number[]): OpenSlice | null {
		if (pending.length > 0) return this.#openSlice(this.#takePending());
		if (this.#options.shuffleOverEpochs !== -1) return null;
		return this.#openSlice(this.#generator.below(this.#offsets.length - 1));
	}

	#openSlice(index: number): OpenSlice {
		return { index, current: this.#offsets[index]! };
	}

	#sizeOf(slice: number): number {
		const end = this.#offsets[slice + 1];
		if (end === undefined) {
			throw new FatalSampleError(
				`The loader state is at slice ${slice}, but this worker has ${this.#offsets.length - 1}: it was saved with other shards or slice sizes.`,
			);
		}
		return end - this.#offsets[slice]!;
	}

	override resetOwn(): void {
		this.#generator = this.worker.generator();
		this.#pending = null;
		this.#pendingOffset = null;
		this.#open = new Array(this.#options.parallelSlices).fill(null);
		this.#sampleCount = 0;
		this.#epochCount = 0;
		this.#epochSampleCount = 0;
	}

	protected override ownState(): Record<string, StateValue> {
		return {
			_worker_rng: generatorField(this.#generator),
			_pending_slices_offset: this.#pendingOffset,
			_pending_slice_indexes: this.#pending === null ? null : [...this.#pending],
			_active_slice_state: this.#open.map((slice) => (slice === null ? null : { ...slice })),
			_sample_count: this.#sampleCount,
			_epoch_count: this.#epochCount,
			_epoch_sample_count: this.#epochSampleCount,
		};
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#generator = fields.generator("_worker_rng");
		this.#pendingOffset = fields.numberOrNull("_pending_slices_offset");
		this.#pending = [...(fields.listOrNull<number>("_pending_slice_indexes") ?? [])];
		if (this.#pendingOffset === null) this.#pending = null;
		this.#open = fields
			.list<{ index: number; current: number } | null>("_active_slice_state")
			.map((slice) => (slice === null ? null : { ...slice }));
		this.#sampleCount = fields.number("_sample_count");
		this.#epochCount = fields.number("_epoch_count");
		this.#epochSampleCount = fields.number("_epoch_sample_count");
	}

	/** Energon itself cannot restore joined samples by its keys. */
	override restoreSample(key: RestoreKey): RawRecord {
		const joined = key[0] === JOINED && this.worker.compatibility === "exact";
		const own = joined ? key.slice(1) : key;
		const index = own[1];
		if (own.length !== 2 || own[0] !== "Webdataset" || typeof index !== "number") {
			throw new FatalSampleError(`The restore key ${JSON.stringify(key)} does not name a sample.`);
		}
		return { restoreKey: own, data: this.#options.readers.map((reader) => reader.read(index)) };
	}
}
