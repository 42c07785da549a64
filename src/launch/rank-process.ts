/** A rank's process as its launcher holds it: its output, its end, and the places that it is told to take. */
import type { Subprocess } from "bun";
import { beforeLine, type TerminalStream } from "../observe/progress.ts";
import { environmentOf, type NextPlace, type Place } from "./place.ts";

export interface RankProcessOptions {
	readonly command: readonly string[];
	readonly place: Place;
	/** Whether it writes to the launcher's own output, such as a terminal. */
	readonly inherits: boolean;
	/** Called when the process has ended. */
	readonly onExit: (process: RankProcess) => Promise<void>;
}

export class RankProcess {
	readonly #process: Subprocess;
	/** Resolves when the process has ended, `onExit` too, and all its output has been read. */
	readonly ended: Promise<unknown>;
	#exited = false;
	/** Begins every line that the process prints. */
	prefix = "";

	/** `restarts`: the process may be told to take another place. */
	constructor({ command, place, inherits, onExit }: RankProcessOptions) {
		const to = inherits ? "inherit" : "pipe";
		this.#process = Bun.spawn([...command], {
			argv0: process.argv0,
			env: { ...process.env, ...environmentOf(place) },
			// The last descriptor is `launcherErrors`.
			stdio: [place.restarts ? "pipe" : "ignore", to, to, process.stderr.fd],
		});
		const { stdout, stderr } = this.#process;
		const forward = (from: typeof stdout, to: TerminalStream) =>
			forwardLines(from as ReadableStream<Uint8Array>, to, () => this.prefix);
		const output = inherits ? [] : [forward(stdout, process.stdout), forward(stderr as typeof stdout, process.stderr)];
		const exited = this.#process.exited.then(async () => {
			this.#exited = true;
			await onExit(this);
		});
		this.ended = Promise.all([exited, ...output]);
	}

	get pid(): number {
		return this.#process.pid;
	}

	get exited(): boolean {
		return this.#exited;
	}

	/** null: it still runs, or a signal has ended it. */
	get code(): number | null {
		return this.#process.exitCode;
	}

	get signal(): Subprocess["signalCode"] {
		return this.#process.signalCode;
	}

	/** Resolves when the process has ended, or after some milliseconds. */
	async endedWithin(milliseconds: number): Promise<void> {
		await Promise.race([this.#process.exited, Bun.sleep(milliseconds)]);
	}

	kill(signal: NodeJS.Signals): void {
		if (!this.#exited) this.#process.kill(signal);
	}

	/** Tells the process, when it asks, the place to go on at; null: to end. */
	async goOn(next: NextPlace | null): Promise<void> {
		const input = this.#process.stdin;
		if (this.#exited || typeof input !== "object") return;
		try {
			if (next !== null) input.write(`${JSON.stringify(next)}\n`);
			await (next === null ? input.end() : input.flush());
		} catch {
			// It has ended meanwhile, as onExit tells.
		}
	}
}

/** Writes each line of `from` to `to` with `prefix`; resolves at the end of `from`. */
async function forwardLines(from: ReadableStream<Uint8Array>, to: TerminalStream, prefix: () => string): Promise<void> {
	const decoder = new TextDecoder();
	let rest = "";
	for await (const bytes of from) {
		const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
		rest = lines.pop()!;
		for (const line of lines) to.write(`${beforeLine(to)}${prefix()}${line}\n`);
	}
	rest += decoder.decode();
	if (rest !== "") to.write(`${beforeLine(to)}${prefix()}${rest}\n`);
}
