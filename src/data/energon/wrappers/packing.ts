/**
 * Packs several samples into a sequence (docs/spec/energon.md §5.2): a full buffer is divided into groups, and each group becomes
 * an output. Samples that the division carries over are the first of the next buffer; samples that it does not return are
 * dropped.
 */
import { ErrorContext, FatalSampleError } from "../errors.ts";
import type { Hook } from "../hook.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { Dataset, type StateFields, type StateValue } from "./dataset.ts";
import { restoring } from "./map.ts";
import { SampleBuffer } from "./shuffle-buffer.ts";

export type Groups<Item> = readonly (readonly Item[])[];

/** The division of a buffer. */
export interface Division<Item> {
	/** Groups that become packs now. */
	readonly groups: Groups<Item>;
	/** Samples that are carried over to the next buffer; always empty in Energon. */
	readonly carried: readonly Item[];
}

export interface PackingHooks<In extends Keyed, Out extends Keyed> {
	/** Divides a buffer, whose first samples were carried over; a plain list of groups carries no samples over. */
	readonly select: Hook<readonly In[], Groups<In> | Division<In>>;
	/** Packs a group into a single output, because a state between several outputs could not be saved. */
	readonly pack: Hook<readonly In[], Out>;
}

export class PackingDataset<In extends Keyed, Out extends Keyed> extends Dataset<Out> {
	readonly className = "PackingDataset";
	readonly #source: Dataset<In>;
	readonly #size: number;
	readonly #hooks: PackingHooks<In, Out>;
	readonly #selectErrors: ErrorContext;
	readonly #packErrors: ErrorContext;
	/** Samples that are not divided yet. */
	#reading: SampleBuffer<In>;
	/** Samples of the waiting groups, group after group, and the lengths of the groups. */
	#prepared: SampleBuffer<In>;
	#lengths: number[] = [];
	/** Whether the source has ended, so that only the samples in the buffers remain of this pass. */
	#sourceEnded = false;
	#selectCalls = 0;
	#packCalls = 0;

	constructor(source: Dataset<In>, size: number, hooks: PackingHooks<In, Out>) {
		super(source.worker, [source]);
		if (!(size > 0)) throw new FatalSampleError(`packing_buffer_size is ${size}; it must be above 0.`);
		this.#source = source;
		this.#size = size;
		this.#hooks = hooks;
		this.#reading = new SampleBuffer(source);
		this.#prepared = new SampleBuffer(source);
		const { errorHandler } = this.worker.config;
		this.#selectErrors = new ErrorContext(hooks.select.name, errorHandler, hooks.select.tolerance);
		this.#packErrors = new ErrorContext(hooks.pack.name, errorHandler, hooks.pack.tolerance);
	}

	override lengthOfWorker(worker: number): number {
		return this.#source.lengthOfWorker(worker);
	}

	override *iterate(): Generator<Out, void, void> {
		this.#prepared.start();
		this.#reading.start();
		const source = this.#source.iterate();
		const { tolerance } = this.#hooks.select;
		let roundsWithoutPack = 0;
		while (!this.#sourceEnded && this.#fill(source)) {
			if (this.#lengths.length === 0) {
				this.#select();
				if (this.#lengths.length === 0) {
					roundsWithoutPack++;
					if (tolerance > 0 && roundsWithoutPack > tolerance) {
						throw new FatalSampleError(
							`${this.#hooks.select.name} made no pack in ${roundsWithoutPack} rounds: the program or the data set is broken.`,
						);
					}
					continue;
				}
			}
			roundsWithoutPack = 0;
			yield* this.#nextPack();
		}
		this.#sourceEnded = true;
		for (;;) {
			while (this.#lengths.length > 0) yield* this.#nextPack();
			const { length } = this.#reading;
			if (length === 0) break;
			this.#select();
			if (this.#reading.length === length)
				throw new FatalSampleError(`${this.#hooks.select.name} carries everything over.`);
		}
		this.#sourceEnded = false;
	}

	/** Fills the buffer; false when the source ended first. */
	#fill(source: Generator<In, void, void>): boolean {
		while (this.#reading.length + this.#prepared.length < this.#size) {
			const step = source.next();
			if (step.done) return false;
			this.#reading.push(step.value);
		}
		return true;
	}

	#select(): void {
		const samples = this.#reading.takeFirst(this.#reading.length);
		let division: Groups<In> | Division<In> = [];
		try {
			this.#selectCalls++;
			division = this.#hooks.select.run(samples);
			this.#selectErrors.succeeded();
		} catch (error) {
			this.#selectErrors.failed(error, samples);
		}
		const { groups, carried } = "groups" in division ? division : { groups: division, carried: [] };
		for (const sample of carried) this.#reading.push(sample);
		for (const group of groups) {
			if (group.length === 0) continue;
			for (const sample of group) this.#prepared.push(sample);
			this.#lengths.push(group.length);
		}
	}

	*#nextPack(): Generator<Out, void, void> {
		const length = this.#lengths[0]!;
		const members = this.#prepared.first(length);
		this.#prepared.takeFirst(length);
		this.#lengths.shift();
		try {
			const keys = members.map((sample) => sample.restoreKey);
			const call = this.#packCalls++;
			const output = this.#hooks.pack.run(members);
			this.#packErrors.succeeded();
			output.restoreKey = [this.className, call, ...keys];
			yield output;
		} catch (error) {
			this.#packErrors.failed(error, members);
		}
	}

	override resetOwn(): void {
		this.#sourceEnded = false;
		this.#reading = new SampleBuffer(this.#source);
		this.#prepared = new SampleBuffer(this.#source);
		this.#lengths = [];
		this.#selectCalls = 0;
		this.#packCalls = 0;
	}

	protected override ownState(): Record<string, StateValue> {
		return {
			_reading_buffer: this.#reading.state(),
			_pre_packing_buffer: this.#prepared.state(),
			_pre_packing_lengths: [...this.#lengths],
			_pre_packing_sample_index: this.#selectCalls,
			// Energon's, of samples that are encoded after the selection.
			_sample_encoder_sample_index: 0,
			_final_packing_sample_index: this.#packCalls,
		};
	}

	protected override exactState(): Record<string, StateValue> {
		return { _source_ended: this.#sourceEnded };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#sourceEnded = fields.flag("_source_ended");
		this.#reading.restore(fields.node("_reading_buffer"));
		this.#prepared.restore(fields.node("_pre_packing_buffer"));
		this.#lengths = [...fields.list<number>("_pre_packing_lengths")];
		this.#selectCalls = fields.number("_pre_packing_sample_index");
		this.#packCalls = fields.number("_final_packing_sample_index");
	}

	override restorable(): string | null {
		const { pack } = this.#hooks;
		return pack.stateless ? super.restorable() : pack.name;
	}

	override restoreSample(key: RestoreKey): Out {
		const { pack } = this.#hooks;
		const reason = this.restorable();
		if (reason !== null) throw new FatalSampleError(`Packs cannot be restored through ${reason}: it is not stateless.`);
		const [, rest] = this.takeKey(key, 1);
		const members = (rest as readonly RestoreKey[]).map((inner) => this.#source.restoreSample(inner));
		return restoring(this.worker.config.restoreErrorHandler, members, () => {
			const output = pack.run(members);
			output.restoreKey = key;
			return output;
		});
	}
}
