/**
 * Signals that ask for an end after the current step: SIGTERM, and SIGUSR1, which batch systems send ahead of time, mean to
 * save first; SIGINT comes from a terminal, and a second one ends the run at once.
 */

import { exitCodes } from "../native/exit-codes.ts";

/** Milliseconds: a terminal and a launcher both pass one key press on. */
const sameKeyPress = 500;

/** Listens as long as it lives. */
export class ExitSignals implements Disposable {
	#asked: NodeJS.Signals | null = null;
	#askedAt = 0;
	readonly #listener = (signal: NodeJS.Signals) => {
		const now = performance.now();
		const again = signal === "SIGINT" && this.#asked === signal && now - this.#askedAt > sameKeyPress;
		if (again) process.exit(exitCodes.interrupted);
		this.#asked = signal;
		this.#askedAt = now;
	};

	constructor(private readonly signals: readonly NodeJS.Signals[] = ["SIGTERM", "SIGUSR1"]) {
		for (const signal of signals) process.on(signal, this.#listener);
	}

	/** The signal that has come so far, or null. Signals arrive while the event loop turns, so it does. */
	async asked(): Promise<NodeJS.Signals | null> {
		await new Promise<void>((resolve) => setImmediate(resolve));
		return this.#asked;
	}

	[Symbol.dispose](): void {
		for (const signal of this.signals) process.off(signal, this.#listener);
	}
}
