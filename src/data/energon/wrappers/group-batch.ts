/** Batches of samples with equal group keys, where each group has its own batch size (docs/spec/energon.md §5.1). */
import { ErrorContext, FatalSampleError } from "../errors.ts";
import { type FunctionHook, runHook } from "../hook.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { Dataset, type NodeState, StateFields, type StateValue } from "./dataset.ts";
import { restoring } from "./map.ts";
import { SampleBuffer } from "./shuffle-buffer.ts";

/** Group of a sample, and the size of that group's batches (null = the loader's batch size). */
export interface Group {
	readonly key: string;
	readonly batchSize: number | null;
}

interface Bucket<Item extends Keyed> {
	readonly batchSize: number;
	readonly samples: SampleBuffer<Item>;
}

export class GroupBatchDataset<In extends Keyed, Out extends Keyed> extends Dataset<Out> {
	readonly className = "GroupBatchDataset";
	readonly #source: Dataset<In>;
	readonly #grouper: FunctionHook<In, Group>;
	readonly #batcher: FunctionHook<readonly In[], Out>;
	readonly #groupErrors: ErrorContext;
	readonly #batchErrors: ErrorContext;
	#groupCalls = 0;
	#batchCalls = 0;
	/** Whether the source has ended, so that only the samples in the buckets remain of this pass. */
	#sourceEnded = false;
	#buckets = new Map<string, Bucket<In>>();

	constructor(
		source: Dataset<In>,
		private readonly fixedBatchSize: number | null,
		grouper: FunctionHook<In, Group>,
		batcher: FunctionHook<readonly In[], Out>,
		private readonly dropLast: boolean,
	) {
		super(source.worker, [source]);
		this.#source = source;
		this.#grouper = grouper;
		this.#batcher = batcher;
		const { errorHandler } = this.worker.config;
		this.#groupErrors = new ErrorContext(grouper.name, errorHandler, batcher.tolerance);
		this.#batchErrors = new ErrorContext(batcher.name, errorHandler, batcher.tolerance);
	}

	override lengthOfWorker(worker: number): number {
		return this.#source.lengthOfWorker(worker);
	}

	override *iterate(): Generator<Out, void, void> {
		for (const bucket of this.#buckets.values()) bucket.samples.start();
		for (const sample of this.#sourceEnded ? [] : this.#source.iterate()) {
			const bucket = this.#bucketOf(sample);
			if (bucket === null) continue;
			bucket.samples.push(sample);
			if (bucket.samples.length >= bucket.batchSize) yield* this.#flush(bucket);
		}
		this.#sourceEnded = true;
		if (!this.dropLast) {
			for (const bucket of this.#buckets.values()) if (bucket.samples.length > 0) yield* this.#flush(bucket);
		}
		this.#buckets.clear();
		this.#sourceEnded = false;
	}

	#bucketOf(sample: In): Bucket<In> | null {
		let group: Group;
		try {
			group = runHook(this.worker, this.#grouper, this.#groupCalls++, sample);
			this.#groupErrors.succeeded();
		} catch (error) {
			this.#groupErrors.failed(error, sample);
			return null;
		}
		const batchSize = this.fixedBatchSize ?? group.batchSize;
		if ((group.batchSize === null) === (this.fixedBatchSize === null) || batchSize === null) {
			throw new FatalSampleError(
				`Group ${group.key} has batch size ${group.batchSize} and the loader ${this.fixedBatchSize}: exactly one of them must be set.`,
			);
		}
		let bucket = this.#buckets.get(group.key);
		if (bucket === undefined) {
			bucket = { batchSize, samples: new SampleBuffer(this.#source) };
			this.#buckets.set(group.key, bucket);
		} else if (bucket.batchSize !== batchSize) {
			throw new FatalSampleError(`Group ${group.key} has batch sizes ${bucket.batchSize} and ${batchSize}.`);
		}
		return bucket;
	}

	*#flush(bucket: Bucket<In>): Generator<Out, void, void> {
		const batch = bucket.samples.takeFirst(bucket.samples.length);
		try {
			const call = this.#batchCalls++;
			const output = runHook(this.worker, this.#batcher, call, batch);
			this.#batchErrors.succeeded();
			output.restoreKey = [this.className, call, ...batch.map((sample) => sample.restoreKey)];
			yield output;
		} catch (error) {
			this.#batchErrors.failed(error, batch);
		}
	}

	override resetOwn(): void {
		this.#sourceEnded = false;
		this.#groupCalls = 0;
		this.#batchCalls = 0;
		this.#buckets.clear();
	}

	protected override ownState(): Record<string, StateValue> {
		// Pairs keep the order of groups; an object orders numeric keys first.
		const buckets = [...this.#buckets].map(
			([key, { batchSize, samples }]): StateValue => [key, { batch_size: batchSize, samples: samples.state() }],
		);
		return {
			bucket_sample_index: this.#groupCalls,
			batch_sample_index: this.#batchCalls,
			buckets,
		};
	}

	protected override exactState(): Record<string, StateValue> {
		return { _source_ended: this.#sourceEnded };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#sourceEnded = fields.flag("_source_ended");
		this.#groupCalls = fields.number("bucket_sample_index");
		this.#batchCalls = fields.number("batch_sample_index");
		this.#buckets = new Map(
			fields.list<[string, StateValue]>("buckets").map(([key, value]) => {
				const bucket = new StateFields(value as unknown as NodeState);
				const samples = new SampleBuffer<In>(this.#source);
				samples.restore(bucket.node("samples"));
				return [key, { batchSize: bucket.number("batch_size"), samples }];
			}),
		);
	}

	/** Energon never treats the batch function of groups as stateless, so it cannot restore single batches. */
	override restorable(): string | null {
		if (this.worker.compatibility === "energon" || !this.#batcher.stateless) return this.#batcher.name;
		return super.restorable();
	}

	override restoreSample(key: RestoreKey): Out {
		const reason = this.restorable();
		if (reason !== null)
			throw new FatalSampleError(`Batches cannot be restored through ${reason}: it is not stateless.`);
		const [[call], rest] = this.takeKey(key, 1);
		const batch = (rest as readonly RestoreKey[]).map((inner) => this.#source.restoreSample(inner));
		return restoring(this.worker.config.restoreErrorHandler, batch, () => {
			const output = runHook(this.worker, this.#batcher, call!, batch);
			output.restoreKey = key;
			return output;
		});
	}
}
