/**
 * Batches of consecutive samples, and of samples with equal group keys, where each group has its own batch size
 * (docs/spec/energon.md §5.1).
 */
import { ErrorContext, FatalSampleError } from "../errors.ts";
import { type FunctionHook, type Hook, runHook } from "../hook.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { Dataset, type NodeState, StateFields, type StateValue } from "./dataset.ts";
import { restoring } from "./map.ts";
import { SampleBuffer } from "./shuffle-buffer.ts";

export class BatchDataset<In extends Keyed, Out extends Keyed> extends Dataset<Out> {
	readonly className = "BatchDataset";
	readonly #source: Dataset<In>;
	readonly #batcher: Hook<readonly In[], Out>;
	readonly #errors: ErrorContext;
	#calls = 0;
	/** Whether the last, smaller batch of this pass was returned. */
	#sourceEnded = false;
	/** Inputs of the batch whose outputs are being returned one by one, and the number of outputs so far. */
	#generatorKeys: readonly RestoreKey[] | null = null;
	#generatorOffset: number | null = null;

	constructor(
		source: Dataset<In>,
		readonly batchSize: number,
		batcher: Hook<readonly In[], Out>,
		private readonly dropLast: boolean,
	) {
		super(source.worker, [source]);
		this.#source = source;
		this.#batcher = batcher;
		this.#errors = new ErrorContext(batcher.name, this.worker.config.errorHandler, batcher.tolerance);
	}

	override lengthOfWorker(worker: number): number {
		const samples = this.#source.lengthOfWorker(worker);
		return this.dropLast ? Math.floor(samples / this.batchSize) : Math.ceil(samples / this.batchSize);
	}

	override *iterate(): Generator<Out, void, void> {
		if (this.#generatorKeys !== null) yield* this.#resumeGenerator(this.#generatorKeys);
		if (!this.#sourceEnded) {
			let batch: In[] = [];
			for (const sample of this.#source.iterate()) {
				batch.push(sample);
				if (batch.length < this.batchSize) continue;
				yield* this.#flush(batch);
				batch = [];
			}
			this.#sourceEnded = true;
			if (batch.length > 0 && !this.dropLast) yield* this.#flush(batch);
		}
		this.#sourceEnded = false;
	}

	*#flush(batch: readonly In[]): Generator<Out, void, void> {
		try {
			const keys = batch.map((sample) => sample.restoreKey);
			const call = this.#calls++;
			if (this.#batcher.kind === "generator") {
				this.#generatorKeys = keys;
				this.#generatorOffset = 0;
				yield* this.#outputs(batch, keys, call, 0);
				this.#generatorKeys = null;
				this.#generatorOffset = null;
			} else {
				const output = runHook(this.worker, this.#batcher, call, batch);
				this.#errors.succeeded();
				output.restoreKey = [this.className, call, ...keys];
				yield output;
			}
		} catch (error) {
			this.#errors.failed(error, batch);
		}
	}

	*#outputs(batch: readonly In[], keys: readonly RestoreKey[], call: number, from: number): Generator<Out, void, void> {
		let position = 0;
		for (const output of runHook.generator(this.worker, this.#batcher, call, batch)) {
			if (position >= from) {
				this.#generatorOffset = position + 1;
				this.#errors.succeeded();
				output.restoreKey = [this.className, call, position, ...keys];
				yield output;
			}
			position++;
		}
	}

	*#resumeGenerator(keys: readonly RestoreKey[]): Generator<Out, void, void> {
		const call = this.worker.compatibility === "energon" ? this.#calls : this.#calls - 1;
		const batch = keys.map((key) => this.#source.restoreSample(key));
		yield* this.#outputs(batch, keys, call, this.#generatorOffset ?? 0);
		this.#generatorKeys = null;
		this.#generatorOffset = null;
	}

	override resetOwn(): void {
		this.#sourceEnded = false;
		this.#calls = 0;
		this.#generatorKeys = null;
		this.#generatorOffset = null;
	}

	protected override ownState(): Record<string, StateValue> {
		return {
			_sample_index: this.#calls,
			_generator_sample_keys: this.#generatorKeys as StateValue,
			_generator_offset: this.#generatorOffset,
		};
	}

	protected override exactState(): Record<string, StateValue> {
		return { _source_ended: this.#sourceEnded };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#sourceEnded = fields.flag("_source_ended");
		this.#calls = fields.number("_sample_index");
		this.#generatorKeys = fields.keyOrNull("_generator_sample_keys") as readonly RestoreKey[] | null;
		this.#generatorOffset = fields.numberOrNull("_generator_offset");
	}

	override restorable(): string | null {
		return this.#batcher.stateless ? super.restorable() : this.#batcher.name;
	}

	override restoreSample(key: RestoreKey): Out {
		if (!this.#batcher.stateless) {
			throw new FatalSampleError(`Batches cannot be restored through ${this.#batcher.name}: it is not stateless.`);
		}
		const generating = this.#batcher.kind === "generator";
		const [[call, position], rest] = this.takeKey(key, generating ? 2 : 1);
		const keys = rest as readonly RestoreKey[];
		const batch = keys.map((inner) => this.#source.restoreSample(inner));
		return restoring(this.worker.config.restoreErrorHandler, batch, () => {
			if (!generating) {
				const output = runHook(this.worker, this.#batcher, call!, batch);
				output.restoreKey = key;
				return output;
			}
			let at = 0;
			for (const output of runHook.generator(this.worker, this.#batcher, call!, batch)) {
				if (at++ !== position) continue;
				output.restoreKey = key;
				return output;
			}
			throw new FatalSampleError(`${this.#batcher.name} made fewer outputs than when the batch was saved.`);
		});
	}
}

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
