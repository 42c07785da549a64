/** Applies a function to every sample: loading, cooking, encoding (docs/spec/energon.md §4.1, §5.1). */
import { ErrorContext, FatalSampleError, SkipSample } from "../errors.ts";
import type { Hook } from "../hook.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { addKey, Dataset, type StateFields, type StateValue } from "./dataset.ts";

export class MapDataset<In extends Keyed, Out extends Keyed> extends Dataset<Out> {
	readonly className = "MapDataset";
	readonly #source: Dataset<In>;
	readonly #hook: Hook<In, Out>;
	readonly #errors: ErrorContext;
	/** Number of the next call. */
	#calls = 0;

	constructor(source: Dataset<In>, hook: Hook<In, Out>) {
		super(source.worker, [source]);
		this.#source = source;
		this.#hook = hook;
		this.#errors = new ErrorContext(hook.name, this.worker.config.errorHandler, hook.tolerance);
	}

	override lengthOfWorker(worker: number): number {
		return this.#source.lengthOfWorker(worker);
	}

	override *iterate(): Generator<Out, void, void> {
		for (const sample of this.#source.iterate()) {
			try {
				const call = this.#calls++;
				const mapped = this.#hook.run(sample);
				this.#errors.succeeded();
				yield addKey(mapped, this.className, call);
			} catch (error) {
				this.#errors.failed(error, sample);
			}
		}
	}

	override resetOwn(): void {
		this.#calls = 0;
	}

	protected override ownState(): Record<string, StateValue> {
		// Energon's fields of a function with several outputs for an input.
		return { _sample_index: this.#calls, _generator_sample_key: null, _generator_offset: null };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#calls = fields.number("_sample_index");
	}

	override restorable(): string | null {
		return this.#hook.stateless ? super.restorable() : this.#hook.name;
	}

	override restoreSample(key: RestoreKey): Out {
		if (!this.#hook.stateless) {
			throw new FatalSampleError(`Samples cannot be restored through ${this.#hook.name}: it is not stateless.`);
		}
		const [[call], rest] = this.takeKey(key, 1);
		const sample = this.#source.restoreSample(rest);
		return restoring(this.worker.config.restoreErrorHandler, sample, () =>
			addKey(this.#hook.run(sample), this.className, call!),
		);
	}
}

/** Runs a step of a restore. Failures go to the handler; if it does not throw, the result is undefined. */
export function restoring<Out>(
	handler: (error: Error, sample: unknown, sources: readonly never[]) => void,
	sample: unknown,
	run: () => Out,
): Out {
	try {
		return run();
	} catch (error) {
		const failure =
			error instanceof SkipSample
				? new FatalSampleError("A sample was skipped that was not skipped when the state was saved.")
				: (error as Error);
		handler(failure, sample, []);
		return undefined as Out;
	}
}
