/** A folder in which commands run for one drawn configuration, and what their outcomes say. */
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { exitCodes } from "../../src/system/exit-codes.ts";
import { executable } from "../commands/mimo.ts";
import { argumentsOf, type Flags } from "./configuration-draw.ts";

/** A command refused the configuration with a sentence, after the checks of the configuration had allowed it. */
export class Refused extends Error {}

/** What a run must not do: crash, hang, or give another result. */
export class Wrong extends Error {}

/** A step or an evaluation of a JSON log. */
export type Step = Readonly<Record<string, unknown>>;

const secondsOfCommand = 180;
/** Messages of a bug, wherever they stand. */
const bugs = /Unexpected error|TypeError|ReferenceError|\n\s+at .+:\d+:\d+|AddressSanitizer|Segmentation|panic|assert/i;

export class Case implements Disposable {
	readonly folder = mkdtempSync(join(tmpdir(), "mimo-configuration-"));
	/** Commands that have run, as a shell takes them. */
	readonly commands: string[] = [];

	path(name: string): string {
		return join(this.folder, name);
	}

	/** Standard output. Throws Refused or Wrong; with output, `failing` exit codes are results too. */
	mimo(args: readonly string[], failing: readonly number[] = []): string {
		this.commands.push(`mimo ${args.map(quoted).join(" ")}`);
		const { exitCode, signalCode, stdout, stderr } = Bun.spawnSync([executable, ...args], {
			cwd: this.folder,
			env: { ...process.env, MIMO_DEBUG: "0" },
			stdout: "pipe",
			stderr: "pipe",
			timeout: secondsOfCommand * 1000,
		});
		const said = stderr.toString().trim();
		const output = stdout.toString();
		if (exitCode === 0 || (failing.includes(exitCode) && output !== "")) {
			if (bugs.test(said)) throw new Wrong(`${args[0]} says ${said}`);
			return output;
		}
		if (signalCode !== undefined && signalCode !== null) {
			throw new Wrong(`${args[0]} was ended by ${signalCode} (${secondsOfCommand} s are allowed): ${said}`);
		}
		const told = exitCode === exitCodes.usage || exitCode === exitCodes.failure;
		if (!told || said === "" || bugs.test(said)) throw new Wrong(`${args[0]} ends with ${exitCode}: ${said}`);
		throw new Refused(said);
	}

	/** Trains and gives the steps and evaluations of its log. */
	train(name: string, flags: Flags): Step[] {
		this.mimo(["train", ...argumentsOf({ ...flags, "log-json": `${name}.jsonl` })]);
		return this.log(name);
	}

	log(name: string): Step[] {
		return readFileSync(this.path(`${name}.jsonl`), "utf8")
			.trim()
			.split("\n")
			.map((line) => JSON.parse(line) as Step)
			.filter(({ event }) => event === undefined)
			.map(resultsOf);
	}

	/** SHA-256 of every tensor of a checkpoint. */
	tensors(checkpoint: string): Record<string, string> {
		const listing = JSON.parse(this.mimo(["convert-ckpt", "inspect", checkpoint, "--json"])) as {
			readonly tensors: readonly {
				readonly name: string;
				readonly sha256: string;
				readonly shape: readonly number[];
			}[];
		};
		return Object.fromEntries(listing.tensors.map(({ name, sha256, shape }) => [`${name} [${shape}]`, sha256]));
	}

	[Symbol.dispose](): void {
		rmSync(this.folder, { recursive: true, force: true });
	}
}

function quoted(argument: string): string {
	return /^[\w./,=:+-]*$/.test(argument) ? argument : `'${argument}'`;
}

/** Times, memory and what depends on them. */
const measured = ["modules", "memory", "time", "elapsed_ms", "tokens_per_second", "throughput", "timers", "bridge"];

function resultsOf(step: Step): Step {
	return Object.fromEntries(Object.entries(step).filter(([name]) => !measured.includes(name)));
}

/** Numbers of a step by their names, those in lists and objects included. */
export function numbersOf(value: unknown, name = ""): [name: string, number: number][] {
	if (typeof value === "number") return [[name, value]];
	if (typeof value !== "object" || value === null) return [];
	return Object.entries(value).flatMap(([key, inner]) => numbersOf(inner, name === "" ? key : `${name} ${key}`));
}

/** Throws Wrong unless both logs have the same steps, bit for bit. `only`: fields of the first that count; absent: all. */
export function requireEqual(what: string, expected: readonly Step[], found: readonly Step[]): void {
	if (expected.length !== found.length) {
		throw new Wrong(`${what}: ${found.length} lines of the log instead of ${expected.length}`);
	}
	expected.forEach((step, at) => {
		for (const [name, value] of Object.entries(step)) {
			const [a, b] = [JSON.stringify(value), JSON.stringify(found[at]![name])];
			if (a !== b) throw new Wrong(`${what}: ${name} of step ${step.iteration} is ${b} instead of ${a}`);
		}
	});
}

/** Relative differences that sums in another order cause, of a loss and of a gradient norm. */
const limits = { loss: 1e-4, grad_norm: 2e-3 };

/**
 * Throws Wrong unless both logs have the same steps up to rounding. Returns false from the step on in which a tie between
 * two experts was decided otherwise.
 */
export function requireNear(what: string, expected: readonly Step[], found: readonly Step[]): boolean {
	if (expected.length !== found.length) {
		throw new Wrong(`${what}: ${found.length} lines of the log instead of ${expected.length}`);
	}
	for (const [at, step] of expected.entries()) {
		const other = found[at]!;
		if (JSON.stringify(step.tokens_per_expert) !== JSON.stringify(other.tokens_per_expert)) {
			if (at > 0) return false;
			const [a, b] = [step, other].map((s) => numbersOf(s.tokens_per_expert).map(([, count]) => count));
			const moved = a!.reduce((sum, count, i) => sum + Math.abs(count - b![i]!), 0);
			// One token that goes elsewhere is a tie.
			if (moved > 2) throw new Wrong(`${what}: experts of step 1 get ${b} tokens instead of ${a}`);
			return false;
		}
		for (const [name, value] of Object.entries(step)) {
			if (!/loss$|grad_norm|tokens$|samples$|learning_rate/.test(name) || typeof value !== "number") continue;
			const limit = name === "grad_norm" ? limits.grad_norm : limits.loss;
			const number = other[name];
			if (typeof number === "number" && Math.abs(number - value) <= limit * Math.max(Math.abs(value), 1e-6)) continue;
			throw new Wrong(`${what}: ${name} of step ${step.iteration} is ${number} instead of ${value}`);
		}
	}
	return true;
}
