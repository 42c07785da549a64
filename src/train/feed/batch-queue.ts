/** A rank's batches step by step, read while a GPU still works on the step before. */
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { BatchSource } from "./batch-source.ts";

type Microbatches = readonly ImageTextMicrobatch[];

export class BatchQueue {
	readonly #read = new Map<number, Promise<Microbatches>>();

	/**
	 * `last`: the training's last step. `upcoming`: how many steps beyond its own a step wants the batches of. A source that
	 * keeps a state is never read ahead: the state in a checkpoint must be that of the saved step.
	 */
	constructor(
		private readonly source: Pick<BatchSource, "step" | "save">,
		private readonly last: number,
		private readonly upcoming: 0 | 1,
	) {}

	/** The batches of a step, and those of the next where they are wanted. */
	async step(iteration: number): Promise<{ readonly microbatches: Microbatches; readonly upcoming: Microbatches }> {
		for (const earlier of this.#read.keys()) if (earlier < iteration) this.#read.delete(earlier);
		const microbatches = await this.#want(iteration);
		const next = iteration + 1;
		// A failed read ends this step: ranks of one tensor-parallel group encode the next batches together, and a rank without
		// them would leave the others' sums to another operation.
		const upcoming = this.upcoming === 1 && this.#mayRead(next) ? await this.#want(next) : [];
		return { microbatches, upcoming };
	}

	/**
	 * Reads all that the step after `iteration` wants. A failure is that step's: step `iteration` is reported and saved as if
	 * nothing had been read.
	 */
	async readAhead(iteration: number): Promise<void> {
		const wanted = Array.from({ length: 1 + this.upcoming }, (_, index) => iteration + 1 + index);
		for (const step of wanted.filter((step) => this.#mayRead(step))) await Promise.allSettled([this.#want(step)]);
	}

	#mayRead(iteration: number): boolean {
		return iteration <= this.last && this.source.save === undefined;
	}

	#want(iteration: number): Promise<Microbatches> {
		const read = this.#read.get(iteration) ?? (async () => await this.source.step(iteration))();
		this.#read.set(iteration, read);
		return read;
	}
}
