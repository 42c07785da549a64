/** Runs a parser on mutated inputs in a process of its own, and watches that process. */
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, dirname, join } from "node:path";
import { type ChildOptions, type Failure, progress, saveInput } from "./child.ts";
import { Mutator } from "./mutate.ts";
import type { FuzzParser } from "./parser.ts";

export interface FuzzOptions {
	readonly cases: number;
	readonly seed: number;
	/** After which no case begins; default: no limit. */
	readonly seconds?: number;
	/** Folder of the inputs that fail. */
	readonly output: string;
	/** Runs this file alone. */
	readonly input?: string;
	/** Seconds without a new case after which the process hangs. */
	readonly patience?: number;
}

export interface FuzzResult {
	readonly parser: string;
	readonly cases: number;
	readonly accepted: number;
	readonly refused: number;
	readonly failed: number;
	readonly seconds: number;
	/** Of processors, over all cases; 0 when the process died. */
	readonly processorSeconds: number;
	/** Milliseconds of the slowest case. */
	readonly slowest: number;
	readonly failures: readonly Failure[];
}

/** Memory of the process in which a parser runs, with all that is not collected yet. */
const mostBytes = 1.5 * 2 ** 30;
const defaultPatience = 30;
/** Processes of one parser that may die. */
const mostDeaths = 10;

/** Paths of the parsers by name. */
export function parsersIn(folder: string): ReadonlyMap<string, string> {
	const files = readdirSync(folder).filter((name) => name.endsWith(".ts"));
	return new Map(files.sort().map((name) => [basename(name, ".ts"), join(folder, name)]));
}

export async function loadParser(path: string): Promise<FuzzParser> {
	return ((await import(path)) as { readonly default: FuzzParser }).default;
}

/** Runs cases of one parser; those after one in which the process died run in another. */
export async function fuzz(name: string, module: string, options: FuzzOptions): Promise<FuzzResult> {
	const folder = mkdtempSync(join(tmpdir(), "mimo-fuzz-"));
	try {
		const page = join(folder, "page");
		writeFileSync(page, new Uint8Array(4096));
		const counts = new Float64Array(Bun.mmap(page, { shared: true }).buffer);
		const failures: Failure[] = [];
		const start = performance.now();
		const limit = options.seconds ?? Number.MAX_SAFE_INTEGER;
		let died = 0;
		for (let from = 0; from < options.cases && died < mostDeaths; ) {
			const spent = (performance.now() - start) / 1000;
			const child: ChildOptions = {
				name,
				module,
				seed: options.seed,
				from,
				to: options.cases,
				seconds: Math.max(0, limit - spent),
				page,
				output: options.output,
				input: options.input ?? null,
			};
			counts[progress.index] = from;
			const death = await runChild(child, counts, failures, options.patience ?? defaultPatience);
			if (death === null) break;
			died++;
			if (counts[progress.opened] === 0) {
				failures.push({ parser: name, reason: `it does not open: ${death}`, index: null, file: null });
				break;
			}
			const index = counts[progress.index]!;
			failures.push(await describeDeath(name, module, options, index, death));
			from = index + 1;
		}
		const [accepted, refused, failed] = [progress.accepted, progress.refused, progress.failed].map((at) => counts[at]!);
		return {
			parser: name,
			cases: accepted! + refused! + failed! + died,
			accepted: accepted!,
			refused: refused!,
			failed: failed! + died,
			seconds: (performance.now() - start) / 1000,
			processorSeconds: counts[progress.processor]!,
			slowest: counts[progress.slowest]!,
			failures,
		};
	} finally {
		rmSync(folder, { recursive: true });
	}
}

/** null: the process finished its work; otherwise the way it died. */
async function runChild(
	options: ChildOptions,
	counts: Float64Array,
	failures: Failure[],
	patience: number,
): Promise<string | null> {
	counts[progress.done] = 0;
	const child = Bun.spawn([process.execPath, join(import.meta.dir, "child.ts"), JSON.stringify(options)], {
		stdin: "ignore",
		stdout: "pipe",
		stderr: "pipe",
		// Files that a killed child leaves there are removed with this folder.
		env: { ...process.env, TMPDIR: dirname(options.page) },
	});
	let reason: string | null = null;
	let last = { index: -1, at: performance.now() };
	const watch = setInterval(() => {
		const now = performance.now();
		if (counts[progress.index] !== last.index) last = { index: counts[progress.index]!, at: now };
		if (now - last.at > patience * 1000) reason ??= `it hangs: no end after ${patience} s`;
		if (residentBytes(child.pid) > mostBytes) reason ??= `the process has more than ${mostBytes} bytes`;
		if (reason !== null) child.kill("SIGKILL");
	}, 100);
	const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
	clearInterval(watch);
	for (const line of stdout.split("\n")) if (line.startsWith("{")) failures.push(JSON.parse(line) as Failure);
	if (options.input !== null) process.stderr.write(stderr);
	if (counts[progress.done] === 1) return null;
	return reason ?? `the process ended with ${child.signalCode ?? child.exitCode}: ${stderr.slice(-2000)}`;
}

/** The case in which the process died, its input saved. */
async function describeDeath(
	parser: string,
	module: string,
	{ seed, output }: FuzzOptions,
	index: number,
	reason: string,
): Promise<Failure> {
	const target = await (await loadParser(module)).open();
	const bytes = new Mutator(target).input(seed, index);
	target[Symbol.dispose]?.();
	return { parser, reason, index, file: saveInput(output, parser, seed, index, bytes) };
}

function residentBytes(pid: number): number {
	try {
		return Number(readFileSync(`/proc/${pid}/statm`, "utf8").split(" ")[1]) * 4096;
	} catch {
		return 0;
	}
}

/** A line a parser; "per core": cases a second of a processor that has nothing else to do. */
export function resultTable(results: readonly FuzzResult[]): string[] {
	const rows = results.map((r) => [
		r.parser,
		...[r.cases, r.accepted, r.refused, r.failed, r.cases / r.seconds, r.cases / (r.processorSeconds || r.seconds)].map(
			(n) => Math.round(n).toLocaleString("en"),
		),
		`${r.slowest.toFixed(0)} ms`,
	]);
	const lines = [["parser", "cases", "accepted", "refused", "failed", "cases/s", "per core", "slowest"], ...rows];
	const widths = lines[0]!.map((_, column) => Math.max(...lines.map((line) => line[column]!.length)));
	return lines.map((line) =>
		line.map((cell, i) => (i === 0 ? cell.padEnd(widths[i]!) : cell.padStart(widths[i]!))).join("  "),
	);
}
