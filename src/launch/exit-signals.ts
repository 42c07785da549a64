/**
 * Signals that request a stop after the current step: SIGTERM and SIGUSR1, which batch systems send ahead of a time limit, save
 * first; SIGINT comes from a terminal, and a second one ends the run at once.
 */

import { exitCodes } from "../system/exit-codes.ts";

/** Milliseconds within which two SIGINTs are one key press: terminal and launcher each pass it on. */
const sameKeyPress = 500;

/** Listens for signals until it is disposed. */
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

	/** The signal received so far, or null. Turns the event loop once, in which signals arrive. */
	async asked(): Promise<NodeJS.Signals | null> {
		await new Promise<void>((resolve) => setImmediate(resolve));
		return this.#asked;
	}

	[Symbol.dispose](): void {
		for (const signal of this.signals) process.off(signal, this.#listener);
	}
}
