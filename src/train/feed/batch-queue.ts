/** Reads a rank's batches step by step, the next ones while the GPU still works on the current step. */
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { BatchSource } from "./batch-source.ts";

type Microbatches = readonly ImageTextMicrobatch[];

export interface StepBatch {
	readonly microbatches: Microbatches;
	/** The next step's, where they are known. */
	readonly upcoming: Microbatches;
}

export class BatchQueue {
	readonly #read = new Map<number, Promise<Microbatches>>();

	/**
	 * `last`: the training's last step. `upcoming`: number of further steps whose batches a step wants. A source with a state is
	 * never read ahead, because a checkpoint must hold the state after the saved step.
	 */
	constructor(
		private readonly source: Pick<BatchSource, "step" | "save">,
		private readonly last: number,
		private readonly upcoming: 0 | 1,
	) {}

	/** The batches of a step, and of the next step if `upcoming` asks for them. */
	async step(iteration: number): Promise<StepBatch> {
		for (const earlier of this.#read.keys()) if (earlier < iteration) this.#read.delete(earlier);
		const microbatches = await this.#want(iteration);
		const next = iteration + 1;
		// A failed read of the next step fails this one: tensor-parallel ranks encode the next batches together, and a rank
		// without them would leave the others in a collective that it never joins.
		const upcoming = this.upcoming === 1 && this.#mayRead(next) ? await this.#want(next) : [];
		return { microbatches, upcoming };
	}

	/**
	 * Reads what the step after `iteration` wants. A failure is kept for that step, so that step `iteration` is still logged and
	 * saved.
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
