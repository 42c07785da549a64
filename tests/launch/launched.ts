/** Runs program.ts under its own launcher and watches what becomes of it. */
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
		this.#acted = performance.now();
		process.kill(pid, signal);
	}

	async end(): Promise<Ended> {
		await this.process.exited;
		const seconds = (performance.now() - this.#acted) / 1000;
		await this.#streams;
		const { exitCode, signalCode } = this.process;
		return { exitCode, signal: signalCode, stdout: this.#stdout, stderr: this.#stderr, seconds };
	}
}

/** Whether a process still runs (one that has ended but was not reaped does not). */
export function alive(pid: number): boolean {
	const result = Bun.spawnSync(["ps", "-o", "stat=", "-p", String(pid)]);
	const state = result.stdout.toString().trim();
	return state !== "" && !state.startsWith("Z");
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
