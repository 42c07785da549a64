/** A rank's batches step by step, and where it is wanted those of the next step beside them. */
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { BatchSource } from "./batch-source.ts";

export class BatchQueue {
	#next: { readonly iteration: number; readonly microbatches: readonly ImageTextMicrobatch[] } | null = null;

	/**
	 * `ahead`: whether the next step's batches are read too. A source that keeps a state is never read ahead: the state
	 * in a checkpoint must be that of the saved step.
	 */
	constructor(
		private readonly source: BatchSource,
		private readonly ahead: boolean,
	) {}

	/** `last`: the training's last step. */
	async step(
		iteration: number,
		last: number,
	): Promise<{
		readonly microbatches: readonly ImageTextMicrobatch[];
		readonly upcoming: readonly ImageTextMicrobatch[];
	}> {
		const microbatches = this.#next?.iteration === iteration ? this.#next.microbatches : await this.#read(iteration);
		this.#next = null;
		if (!this.ahead || iteration === last || this.source.save !== undefined) return { microbatches, upcoming: [] };
		this.#next = { iteration: iteration + 1, microbatches: await this.#read(iteration + 1) };
		return { microbatches, upcoming: this.#next.microbatches };
	}

	async #read(iteration: number): Promise<readonly ImageTextMicrobatch[]> {
		return await this.source.step(iteration);
	}
}
