/** Whether a failed run goes on in its job: how often, and after which failures. */

export interface RestartOptions {
	/** Most restarts within the window; 0: none. */
	readonly most: number;
	readonly windowMinutes: number;
	/** Processes that wait for the place of a lost one. */
	readonly spares: number;
}

/** A run's failure, as the decision needs it. */
export interface Failure {
	/** null: no rank is to blame. */
	readonly rank: number | null;
	readonly reason: string;
	/** The last step that the rank has finished, counted in the training; 0: none. */
	readonly step: number;
	/** Whether the rank's program has ended by an error of its own, not by a signal or in silence. */
	readonly own: boolean;
}

export class RestartPolicy {
	/** Times of the restarts in the window, in milliseconds. */
	#times: number[] = [];
	#last: Failure | null = null;
	/** Whether a step was done before any failure so far. */
	#stepped = false;

	constructor(private readonly options: Pick<RestartOptions, "most" | "windowMinutes">) {}

	/** Notes a failure. Returns why the run ends, a sentence, or null if it is restarted. `now`: in milliseconds. */
	refusal(failure: Failure, now: number): string | null {
		const { most, windowMinutes } = this.options;
		const last = this.#last;
		this.#last = failure;
		this.#times = this.#times.filter((time) => now - time < windowMinutes * 60_000);
		this.#stepped ||= failure.step > 0;
		if (failure.own && !this.#stepped) return "The run is not restarted: it failed before its first step was done.";
		// Which rank says first what all find, such as a loss that is not finite, is chance.
		if (failure.own && last !== null && last.step === failure.step && last.reason === failure.reason) {
			return `The run is not restarted: it has failed twice after step ${failure.step} for the same reason.`;
		}
		if (this.#times.length >= most) {
			return `The run is not restarted: it was restarted ${most === 1 ? "once" : `${most} times`} within ${windowMinutes} minutes (max-restarts).`;
		}
		this.#times.push(now);
		return null;
	}

	/** The state that another process goes on with: how long ago the restarts in the window were, in milliseconds. */
	history(now: number): { ages: number[]; stepped: boolean } {
		return { ages: this.#times.map((time) => now - time), stepped: this.#stepped };
	}

	/** Goes on with the history of another process. */
	take({ ages, stepped }: { readonly ages: readonly number[]; readonly stepped: boolean }, now: number): void {
		this.#times = ages.map((age) => now - age);
		this.#stepped = stepped;
	}

	/** "Restart 1 of at most 3 within 60 minutes". */
	count(): string {
		const { most, windowMinutes } = this.options;
		return `Restart ${this.#times.length} of at most ${most} within ${windowMinutes} minutes`;
	}

	/** Tells of a restart: "Restart 1 of at most 3 within 60 minutes: new processes for ranks 1 and 2". */
	sentence(replaced: readonly number[]): string {
		const count = this.count();
		const list = replaced
			.toSorted((a, b) => a - b)
			.join(", ")
			.replace(/, (\d+)$/, " and $1");
		const what = replaced.length === 1 ? `a new process for rank ${list}` : `new processes for ranks ${list}`;
		return replaced.length === 0 ? `${count}: every rank keeps its process` : `${count}: ${what}`;
	}
}
