/** Processes of a launched run that have started and wait for the place of a rank whose process is lost. */
import type { RankProcess } from "./rank-process.ts";

export class Spares implements Disposable {
	readonly #idle = new Set<RankProcess>();

	/** `start` starts a process without a place. */
	constructor(
		private readonly number: number,
		private readonly start: () => RankProcess,
	) {}

	/** Starts as many processes as are wanting. */
	fill(): void {
		while (this.#idle.size < this.number) this.#idle.add(this.start());
	}

	/** Takes an idle process that still runs; null: all have ended. */
	take(): RankProcess | null {
		for (const process of this.#idle) {
			this.#idle.delete(process);
			if (!process.exited) return process;
		}
		return null;
	}

	[Symbol.dispose](): void {
		for (const process of this.#idle) process.kill("SIGKILL");
	}
}
