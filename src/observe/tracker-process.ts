/**
 * The process that records a run in MLflow and Weights & Biases: `mimo report - --to …`, which reads the lines of the run's JSON
 * log from its standard input until that ends, also by the death of this process.
 */
import type { Subprocess } from "bun";
import { UserError } from "../system/errors.ts";
import { ownProgram } from "../system/program-version.ts";
import { LogLines } from "./run-log/writer.ts";

/** The process's answer to the start of the run: null, or why the run cannot be recorded. */
export type TrackerAnswer = { readonly refusal: string | null };

export class TrackerProcess extends LogLines {
	readonly #process: Subprocess<"pipe", "inherit", "inherit">;
	readonly #answer = Promise.withResolvers<string | null>();
	/** Whether the process has refused the run, and takes no lines. */
	#refused = false;

	/** `names`: the trackers, joined by commas. */
	constructor(names: string) {
		super();
		this.#process = Bun.spawn([...ownProgram(), "report", "-", "--to", names], {
			argv0: process.argv0,
			stdio: ["pipe", "inherit", "inherit"],
			ipc: ({ refusal }: TrackerAnswer) => this.#answer.resolve(refusal),
		});
		void this.#process.exited.then(() => this.#answer.resolve(this.#ending()));
	}

	/** Waits until the start of the run is recorded. Throws a UserError if it cannot be. */
	async begun(): Promise<void> {
		const refusal = await this.#answer.promise;
		if (refusal === null) return;
		this.#refused = true;
		throw new UserError(refusal);
	}

	/** Waits until all is recorded; whether nothing is missing. */
	async complete(): Promise<boolean> {
		return (await this.#process.exited) === 0;
	}

	close(): void {
		void this.#attempt(() => this.#process.stdin.end());
	}

	protected override append(line: string): void {
		if (this.#refused) return;
		if (this.#process.exitCode !== null || this.#process.signalCode !== null) throw new UserError(this.#ending());
		void this.#attempt(() => this.#process.stdin.write(line));
		void this.#attempt(() => this.#process.stdin.flush());
	}

	/** A pipe that breaks is the end of the process, which the next line and `complete` tell. */
	async #attempt(action: () => unknown): Promise<void> {
		try {
			await action();
		} catch {}
	}

	#ending(): string {
		const { exitCode, signalCode } = this.#process;
		return `The process that records the run for trackers has ended (${signalCode ?? `exit code ${exitCode}`}).`;
	}
}
