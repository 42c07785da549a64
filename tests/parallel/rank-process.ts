/**
 * A process that runs rank programs, one after another: modules that take their arguments from the command line and their place
 * from the environment, and print what they find.
 *
 *   bun rank-process.ts    waits for tasks from the process that started it, and ends with that
 */
import type { RankOutcome } from "./ranks.ts";

interface Task {
	/** Path of the program. */
	readonly program: string;
	readonly args: readonly string[];
	/** Variables that differ between its tasks. */
	readonly env: Readonly<Record<string, string>>;
}

type Ended = Omit<RankOutcome, "rank">;

/** Such a process, on the side that gives tasks. */
export class RankProcess {
	#told: ((outcome: Ended) => void) | null = null;
	#stderr = "";
	readonly #child: Bun.Subprocess<"ignore", "inherit", "pipe">;
	readonly #read: Promise<void>;

	constructor() {
		this.#child = Bun.spawn([process.execPath, import.meta.path], {
			stdin: "ignore",
			stdout: "inherit",
			stderr: "pipe",
			ipc: (outcome: Ended) => this.#told?.(outcome),
		});
		this.#read = this.#keepErrors();
		// A test file that has ended waits for no idle process.
		this.#child.unref();
	}

	/** Resolves when the program has ended, or the process with it. */
	async run(task: Task): Promise<Ended> {
		const { promise, resolve } = Promise.withResolvers<Ended>();
		this.#told = resolve;
		this.#child.send(task);
		const died = this.#child.exited.then(async (): Promise<Ended> => {
			await this.#read;
			return { exitCode: this.#child.exitCode, signal: this.#child.signalCode, stdout: "", stderr: "" };
		});
		const { stderr, ...outcome } = await Promise.race([promise, died]);
		const complaints = this.#stderr;
		this.#stderr = "";
		return { ...outcome, stderr: complaints + stderr };
	}

	end(): void {
		this.#child.kill("SIGKILL");
	}

	async #keepErrors(): Promise<void> {
		const decoder = new TextDecoder();
		for await (const bytes of this.#child.stderr) this.#stderr += decoder.decode(bytes, { stream: true });
	}
}

async function perform({ program, args, env }: Task, number: number): Promise<Ended> {
	Object.assign(process.env, env);
	process.argv.splice(2, process.argv.length, ...args);
	const printed: string[] = [];
	const complaints: string[] = [];
	console.log = (...words: unknown[]) => printed.push(`${words.join(" ")}\n`);
	console.error = console.warn = (...words: unknown[]) => complaints.push(`${words.join(" ")}\n`);
	let exitCode = 0;
	try {
		// The query makes it a module of its own, which is evaluated again; those that it imports are there already.
		await import(`${program}?task=${number}`);
	} catch (thrown) {
		exitCode = 1;
		complaints.push((thrown as Error).stack ?? String(thrown));
	}
	return { exitCode, signal: null, stdout: printed.join(""), stderr: complaints.join("") };
}

if (import.meta.main) {
	let tasks = 0;
	process.on("message", (task: Task) => void perform(task, tasks++).then((outcome) => process.send!(outcome)));
	process.on("disconnect", () => process.exit());
}
