/** A rank's process as its launcher holds it: its output, its end, and the places that it is told to take. */
import type { Subprocess } from "bun";
import { beforeLine, type TerminalStream } from "../observe/progress.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { agentReports, environmentOf, type NextPlace, type Place } from "./place.ts";

/** Exit codes of a rank that has finished, successfully or with a negative result. */
export const finishedCodes: readonly number[] = [0, exitCodes.failure, exitCodes.interrupted, exitCodes.runAgain];
/** Milliseconds for ranks to end by themselves after a failure before they are killed; the rank to blame may be hung. */
export const grace = { blamed: 500, others: 2500 };

export interface RankProcessOptions {
	readonly command: readonly string[];
	readonly place: Place;
	/** Whether it writes to the launcher's own output, such as a terminal. */
	readonly inherits: boolean;
	/** Called when the process has ended. */
	readonly onExit: (process: RankProcess) => Promise<void>;
	/** Called with what the process reports to its agent (place.ts). */
	readonly onReport?: (process: RankProcess, report: unknown) => void;
}

export class RankProcess {
	readonly #process: Subprocess;
	/** Resolves when the process has ended, `onExit` too, and all its output has been read. */
	readonly ended: Promise<unknown>;
	#exited = false;
	/** Begins every line that the process prints. */
	prefix = "";

	/** `restarts`: the process may be told to take another place. */
	constructor({ command, place, inherits, onExit, onReport }: RankProcessOptions) {
		const to = inherits ? "inherit" : "pipe";
		this.#process = Bun.spawn([...command], {
			argv0: process.argv0,
			env: { ...process.env, ...environmentOf(place) },
			// The last two descriptors are `launcherErrors` and `agentReports`.
			stdio: [place.restarts ? "pipe" : "ignore", to, to, process.stderr.fd, onReport ? "pipe" : "ignore"],
		});
		const { stdout, stderr, stdio } = this.#process;
		if (onReport) void readReports(stdio[agentReports] as number, (report) => onReport(this, report));
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

/** Calls `take` with each line that a process writes, as JSON. */
async function readReports(descriptor: number, take: (report: unknown) => void): Promise<void> {
	const decoder = new TextDecoder();
	let rest = "";
	for await (const bytes of Bun.file(descriptor).stream()) {
		const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
		rest = lines.pop()!;
		for (const line of lines) take(JSON.parse(line));
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
