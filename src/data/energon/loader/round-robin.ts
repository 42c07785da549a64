/**
 * Round-robin over workers in order of their numbers; a worker whose pass has ended waits until all have (docs/spec/energon.md
 * §2.3).
 */
export class Turns {
	#next: number;
	readonly #ended: boolean[];

	constructor(workers: number, next = 0, ended: readonly boolean[] = []) {
		this.#next = next;
		this.#ended = Array.from({ length: workers }, (_, i) => ended[i] ?? false);
	}

	/** The worker whose output is next; null if all passes have ended, after which all start again. */
	worker(): number | null {
		if (this.#ended.every((ended) => ended)) {
			this.#ended.fill(false);
			this.#next = 0;
			return null;
		}
		while (this.#ended[this.#next]) this.#next = (this.#next + 1) % this.#ended.length;
		return this.#next;
	}

	/** The current worker has delivered an output. */
	delivered(): void {
		this.#next = (this.#next + 1) % this.#ended.length;
	}

	/** The current worker has ended its pass. */
	endedPass(): void {
		this.#ended[this.#next] = true;
	}

	/** Workers that wait for the others' passes to end. */
	get ended(): readonly boolean[] {
		return [...this.#ended];
	}

	get next(): number {
		return this.#next;
	}

	/** Workers that will be asked after `worker`, nearest first, itself last. */
	*following(): Generator<number, void, void> {
		const count = this.#ended.length;
		for (let i = 0; i < count; i++) yield (this.#next + i) % count;
	}
}
