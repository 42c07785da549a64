/**
 * The process in which cases run: `bun child.ts JSON`. The parent reads how far it is from a shared page, so that it can
 * name the case in which this process hangs, grows or dies.
 */
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Mutator } from "./mutate.ts";
import { type FuzzParser, type FuzzTarget, isNamedRefusal } from "./parser.ts";

/** Fields of the shared page, f64 each. */
export const progress = {
	index: 0,
	accepted: 1,
	refused: 2,
	failed: 3,
	slowest: 4,
	opened: 5,
	done: 6,
	processor: 7,
} as const;

export interface ChildOptions {
	readonly name: string;
	/** Path of the parser's file. */
	readonly module: string;
	readonly seed: number;
	/** First case, and the one after the last. */
	readonly from: number;
	readonly to: number;
	/** After which no case begins. */
	readonly seconds: number;
	/** File of the shared page. */
	readonly page: string;
	/** Folder of the inputs that fail. */
	readonly output: string;
	/** Runs this file alone. */
	readonly input: string | null;
}

export interface Failure {
	readonly parser: string;
	readonly reason: string;
	/** null: a seed input or a file, not a mutation. */
	readonly index: number | null;
	readonly file: string | null;
}

/** Failures of different kinds that are saved. */
const mostSaved = 20;
const defaultMilliseconds = 1000;
const defaultBytes = 2 ** 28;
/** A shorter case cannot have filled much memory. */
const noticeable = 20;

/** Saves an input that failed; the path says how to make it again. */
export function saveInput(folder: string, name: string, seed: number, index: number, bytes: Uint8Array): string {
	mkdirSync(folder, { recursive: true });
	const path = join(folder, `${name}-seed${seed}-case${index}.bin`);
	writeFileSync(path, bytes);
	return path;
}

/** Processor time; other processes of the machine do not count. */
function processorMilliseconds({ user, system }: NodeJS.CpuUsage): number {
	return (user + system) / 1000;
}

type Outcome = "accepted" | "refused" | string;

class Run {
	readonly #saved = new Set<string>();
	readonly #refuses: (error: unknown) => boolean;
	#lastError: unknown = null;
	#base = process.memoryUsage.rss();

	constructor(
		readonly target: FuzzTarget,
		readonly options: ChildOptions,
		readonly page: Float64Array,
	) {
		this.#refuses = target.refuses ?? isNamedRefusal;
	}

	/** The outcome of one input, or why it fails. */
	async #outcome(bytes: Uint8Array): Promise<Outcome> {
		try {
			const result = this.target.parse(bytes);
			if (result instanceof Promise) await result;
			return "accepted";
		} catch (error) {
			this.#lastError = error;
			if (this.#refuses(error)) return "refused";
			return error instanceof Error ? `${error.name}: ${error.message}\n${error.stack}` : String(error);
		}
	}

	/** Runs a case and bounds its time and memory; a case over a bound is run again, since others share the machine. */
	async #measured(bytes: Uint8Array): Promise<Outcome> {
		const { milliseconds = defaultMilliseconds, bytes: most = defaultBytes } = this.target;
		let outcome: Outcome = "";
		let fastest = Number.POSITIVE_INFINITY;
		let smallest = Number.POSITIVE_INFINITY;
		for (let attempt = 0; attempt < 3; attempt++) {
			const processor = attempt === 0 ? null : process.cpuUsage();
			const start = performance.now();
			outcome = await this.#outcome(bytes);
			const wall = performance.now() - start;
			const time = processor === null ? wall : Math.min(wall, processorMilliseconds(process.cpuUsage(processor)));
			fastest = Math.min(fastest, time);
			smallest = Math.min(smallest, time < noticeable ? 0 : process.memoryUsage.rss() - this.#base);
			if (fastest <= milliseconds && smallest <= most) break;
			Bun.gc(true);
			this.#base = process.memoryUsage.rss();
		}
		this.page[progress.slowest] = Math.max(this.page[progress.slowest]!, fastest);
		// Memory first: filling it takes time too.
		if (smallest > most) return `the process grew by ${smallest} bytes, ${most} are allowed`;
		if (fastest > milliseconds) return `it took ${fastest.toFixed(0)} ms, ${milliseconds} ms are allowed`;
		return outcome;
	}

	/** Runs an input; `index` is null for one that is not a mutation. */
	async one(bytes: Uint8Array, index: number | null): Promise<void> {
		const outcome = await this.#measured(bytes);
		if (outcome === "accepted" || outcome === "refused") {
			if (index !== null) this.page[progress[outcome]]!++;
			else if (outcome === "refused" && this.options.input === null) {
				this.#fail(`a seed input is refused: ${this.#lastError}`, null, bytes);
			} else if (this.options.input !== null)
				console.error(`${this.options.name}: ${this.options.input} is ${outcome}.`);
		} else this.#fail(outcome, index, bytes);
	}

	#fail(reason: string, index: number | null, bytes: Uint8Array): void {
		this.page[progress.failed]!++;
		// An error is told from others by the place where it is thrown, not by the input that it repeats.
		const kind = /\n\s*at [^\n]*/.exec(reason)?.[0] ?? reason.replace(/[0-9]+/g, "0");
		if (this.#saved.has(kind) || this.#saved.size >= mostSaved) return;
		this.#saved.add(kind);
		const { name, seed, output } = this.options;
		const file = index === null ? null : saveInput(output, name, seed, index, bytes);
		console.log(JSON.stringify({ parser: name, reason, index, file } satisfies Failure));
	}

	async all(): Promise<void> {
		const { seed, from, to, seconds } = this.options;
		for (const bytes of this.target.seeds) await this.one(new Uint8Array(bytes), null);
		const mutator = new Mutator(this.target);
		const processor = process.cpuUsage();
		const end = performance.now() + seconds * 1000;
		for (let index = from; index < to; index++) {
			if (index % 64 === 0 && performance.now() > end) break;
			this.page[progress.index] = index;
			await this.one(mutator.input(seed, index), index);
			if (index % 4096 === 0) this.#base = process.memoryUsage.rss();
		}
		this.page[progress.processor]! += processorMilliseconds(process.cpuUsage(processor)) / 1000;
	}
}

if (import.meta.main) {
	const options = JSON.parse(process.argv[2]!) as ChildOptions;
	const page = new Float64Array(Bun.mmap(options.page, { shared: true }).buffer);
	const parser = ((await import(options.module)) as { readonly default: FuzzParser }).default;
	const target = await parser.open();
	page[progress.opened] = 1;
	const run = new Run(target, options, page);
	if (options.input === null) await run.all();
	else await run.one(await Bun.file(options.input).bytes(), null);
	target[Symbol.dispose]?.();
	page[progress.done] = 1;
}
