/** Signals that request a stop after the current step: SIGTERM and SIGUSR1, which batch systems send ahead of a time limit. */

const signals = ["SIGTERM", "SIGUSR1"] as const;

/** Listens for signals until it is disposed. */
export class ExitSignals implements Disposable {
	#asked: NodeJS.Signals | null = null;
	readonly #listener = (signal: NodeJS.Signals) => {
		this.#asked = signal;
	};

	constructor() {
		for (const signal of signals) process.on(signal, this.#listener);
	}

	/** The signal received so far, or null. Turns the event loop once, in which signals arrive. */
	async asked(): Promise<NodeJS.Signals | null> {
		await new Promise<void>((resolve) => setImmediate(resolve));
		return this.#asked;
	}

	[Symbol.dispose](): void {
		for (const signal of signals) process.off(signal, this.#listener);
	}
}
