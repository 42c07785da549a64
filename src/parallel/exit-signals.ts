/** Signals that ask for an end after the current step: SIGTERM, and SIGUSR1, which batch systems send ahead of time. */

const signals = ["SIGTERM", "SIGUSR1"] as const;

/** Listens as long as it lives. */
export class ExitSignals implements Disposable {
	#asked: NodeJS.Signals | null = null;
	readonly #listener = (signal: NodeJS.Signals) => {
		this.#asked = signal;
	};

	constructor() {
		for (const signal of signals) process.on(signal, this.#listener);
	}

	/** The signal that has come so far, or null. Signals arrive while the event loop turns, so it does. */
	async asked(): Promise<NodeJS.Signals | null> {
		await new Promise<void>((resolve) => setImmediate(resolve));
		return this.#asked;
	}

	[Symbol.dispose](): void {
		for (const signal of signals) process.off(signal, this.#listener);
	}
}
