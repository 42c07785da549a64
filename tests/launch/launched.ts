/** Runs program.ts under its own launcher and watches what becomes of it. */
import { readFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";

export const program = join(import.meta.dir, "program.ts");

export interface Ended {
	readonly exitCode: number | null;
	readonly signal: string | number | null;
	readonly stdout: string;
	readonly stderr: string;
	/** Seconds from the test's action to the end. */
	readonly seconds: number;
}

export class Launched {
	#stdout = "";
	#stderr = "";
	#acted = performance.now();
	readonly #streams: Promise<unknown>;

	private constructor(readonly process: Bun.Subprocess<"ignore", "pipe", "pipe">) {
		const read = async (stream: ReadableStream<Uint8Array>, add: (text: string) => void) => {
			const decoder = new TextDecoder();
			for await (const bytes of stream) add(decoder.decode(bytes, { stream: true }));
		};
		this.#streams = Promise.all([
			read(process.stdout, (text) => {
				this.#stdout += text;
			}),
			read(process.stderr, (text) => {
				this.#stderr += text;
			}),
		]);
	}

	/** Starts a command, in another folder or with more environment if it is given. */
	static run(
		command: readonly string[],
		{ env = {}, cwd }: { readonly env?: Readonly<Record<string, string>>; readonly cwd?: string } = {},
	): Launched {
		return new Launched(
			Bun.spawn([...command], {
				...(cwd === undefined ? {} : { cwd }),
				env: { ...process.env, MIMO_DEBUG: "0", ...env },
				stdin: "ignore",
				stdout: "pipe",
				stderr: "pipe",
			}),
		);
	}

	/** Starts program.ts; `wrapper` is a command it runs under. */
	static start(args: readonly (string | number)[], env: Record<string, string> = {}, wrapper: string[] = []): Launched {
		return Launched.run([...wrapper, process.execPath, program, ...args.map(String)], { env });
	}

	/** What it has written so far. */
	get output(): string {
		return this.#stdout;
	}

	get errors(): string {
		return this.#stderr;
	}

	/** Seconds since the start or the test's last action. */
	get seconds(): number {
		return (performance.now() - this.#acted) / 1000;
	}

	/** Counts seconds from now. */
	restartClock(): void {
		this.#acted = performance.now();
	}

	/** Process of each rank, as the launcher printed them. */
	get pids(): number[] {
		return [...this.#stdout.matchAll(/^rank \d+: pid (\d+)/gm)].map(([, pid]) => Number(pid));
	}

	/** Resolves with the first match of `pattern` in the output. */
	async said(pattern: RegExp): Promise<RegExpExecArray> {
		const end = performance.now() + 30_000;
		while (performance.now() < end) {
			const match = pattern.exec(this.#stdout) ?? pattern.exec(this.#stderr);
			if (match) return match;
			if (this.process.exitCode !== null) break;
			await Bun.sleep(10);
		}
		throw new Error(`${pattern} was never said:\n${this.#stdout}${this.#stderr}`);
	}

	/** Sends a signal to some process of the run. */
	signal(pid: number, signal: NodeJS.Signals): void {
		this.restartClock();
		process.kill(pid, signal);
	}

	async end(): Promise<Ended> {
		await this.process.exited;
		const { seconds } = this;
		await this.#streams;
		const { exitCode, signalCode } = this.process;
		return { exitCode, signal: signalCode, stdout: this.#stdout, stderr: this.#stderr, seconds };
	}
}

/** Whether a process still runs (one that has ended but was not reaped does not). */
export function alive(pid: number): boolean {
	try {
		// The state follows the program's name in parentheses: proc(5).
		const stat = readFileSync(`/proc/${pid}/stat`, "utf8");
		return !"ZX".includes(stat[stat.lastIndexOf(")") + 2]!);
	} catch {
		return false;
	}
}

/** Waits for the end of processes, ten seconds at most; returns those that still run. */
export async function survivors(pids: readonly number[]): Promise<number[]> {
	const end = performance.now() + 10_000;
	while (pids.some(alive) && performance.now() < end) await Bun.sleep(20);
	return pids.filter(alive);
}

/**
 * A port of this host that is free at the moment. It is drawn from below those that Linux gives to processes that ask
 * for any port: such a port could be given to another test before this one's ranks listen.
 */
export async function freePort(): Promise<number> {
	for (;;) {
		const port = 20_000 + Math.floor(12_000 * Math.random());
		const server = createServer();
		const free = await new Promise<boolean>((resolve) => {
			server.once("error", () => resolve(false));
			server.listen(port, "127.0.0.1", () => resolve(true));
		});
		if (!free) continue;
		await new Promise((resolve) => server.close(resolve));
		return port;
	}
}
