/** Applies a function to every sample: loading, cooking, encoding (docs/spec/energon.md §4.1, §5.1). */
import { ErrorContext, FatalSampleError, SkipSample } from "../errors.ts";
import { type Hook, runHook } from "../hook.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { addKey, Dataset, type StateFields, type StateValue } from "./dataset.ts";

export class MapDataset<In extends Keyed, Out extends Keyed> extends Dataset<Out> {
	readonly className = "MapDataset";
	readonly #source: Dataset<In>;
	readonly #hook: Hook<In, Out>;
	readonly #errors: ErrorContext;
	/** Number of the next call. */
	#calls = 0;
	/** Input whose outputs are being returned one by one, and the number of outputs so far. */
	#generatorKey: RestoreKey | null = null;
	#generatorOffset: number | null = null;

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
		if (this.#generatorKey !== null) yield* this.#resumeGenerator(this.#generatorKey);
		for (const sample of this.#source.iterate()) {
			try {
				const call = this.#calls++;
				if (this.#hook.kind === "generator") {
					this.#generatorKey = sample.restoreKey;
					this.#generatorOffset = 0;
					yield* this.#outputs(sample, call, 0);
					this.#generatorKey = null;
					this.#generatorOffset = null;
				} else {
					const mapped = runHook(this.worker, this.#hook, call, sample);
					this.#errors.succeeded();
					yield addKey(mapped, this.className, call);
				}
			} catch (error) {
				this.#errors.failed(error, sample);
			}
		}
	}

	*#outputs(sample: In, call: number, from: number): Generator<Out, void, void> {
		let position = 0;
		for (const output of runHook.generator(this.worker, this.#hook, call, sample)) {
			if (position >= from) {
				this.#generatorOffset = position + 1;
				this.#errors.succeeded();
				yield addKey(output, this.className, call, position);
			}
			position++;
		}
	}

	/** The remaining outputs of an input. Energon counts them as the next call; exact states keep the call's number. */
	*#resumeGenerator(key: RestoreKey): Generator<Out, void, void> {
		const call = this.worker.compatibility === "energon" ? this.#calls : this.#calls - 1;
		yield* this.#outputs(this.#source.restoreSample(key), call, this.#generatorOffset ?? 0);
		this.#generatorKey = null;
		this.#generatorOffset = null;
	}

	override resetOwn(): void {
		this.#calls = 0;
		this.#generatorKey = null;
		this.#generatorOffset = null;
	}

	protected override ownState(): Record<string, StateValue> {
		return {
			_sample_index: this.#calls,
			_generator_sample_key: this.#generatorKey as StateValue,
			_generator_offset: this.#generatorOffset,
		};
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#calls = fields.number("_sample_index");
		this.#generatorKey = fields.keyOrNull("_generator_sample_key");
		this.#generatorOffset = fields.numberOrNull("_generator_offset");
	}

	override restorable(): string | null {
		return this.#hook.stateless ? super.restorable() : this.#hook.name;
	}

	override restoreSample(key: RestoreKey): Out {
		if (!this.#hook.stateless) {
			throw new FatalSampleError(`Samples cannot be restored through ${this.#hook.name}: it is not stateless.`);
		}
		const generating = this.#hook.kind === "generator";
		const [[call, position], rest] = this.takeKey(key, generating ? 2 : 1);
		const sample = this.#source.restoreSample(rest);
		return restoring(this.worker.config.restoreErrorHandler, sample, () => {
			if (!generating) {
				return addKey(runHook(this.worker, this.#hook, call!, sample), this.className, call!);
			}
			let at = 0;
			for (const output of runHook.generator(this.worker, this.#hook, call!, sample)) {
				if (at === position) return addKey(output, this.className, call!, position);
				at++;
			}
			throw new FatalSampleError(`${this.#hook.name} made fewer outputs than when the sample was saved.`);
		});
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
