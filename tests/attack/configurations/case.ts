/** A folder in which commands run for one drawn configuration, and what their outcomes say. */
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { exitCodes } from "../../../src/system/exit-codes.ts";
import { executable } from "../../commands/mimo.ts";
import { argumentsOf, type Flags } from "./draw.ts";

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
		const { exitCode, signalCode, output, said } = this.#spawn([executable, ...args]);
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

	/**
	 * Trains until a signal comes after so many seconds, or until the run ends itself; null: no signal. Throws Wrong for an end
	 * that neither explains.
	 */
	stop(flags: Flags, signal: string | null, seconds: number): void {
		const train = ["train", ...argumentsOf(flags)];
		const timed = signal === null ? [] : ["timeout", `--signal=${signal}`, "--preserve-status", seconds.toFixed(2)];
		this.commands.push(`${timed.join(" ")} mimo ${train.map(quoted).join(" ")}`.trim());
		const { exitCode, signalCode, said } = this.#spawn([...timed, executable, ...train]);
		// The shell's numbers of a process that a signal ended are 128 and the signal's.
		const killed = signal !== null && (exitCode > 128 || (signalCode !== undefined && signalCode !== null));
		if (bugs.test(said)) throw new Wrong(`train says ${said}`);
		if (exitCode === 0 || exitCode === exitCodes.runAgain || killed) return;
		throw new Wrong(`train that ${signal ?? "its duration"} stopped ends with ${exitCode}: ${said}`);
	}

	#spawn(command: readonly string[]) {
		const { exitCode, signalCode, stdout, stderr } = Bun.spawnSync([...command], {
			cwd: this.folder,
			env: { ...process.env, MIMO_DEBUG: "0" },
			stdout: "pipe",
			stderr: "pipe",
			timeout: secondsOfCommand * 1000,
		});
		return { exitCode, signalCode, output: stdout.toString(), said: stderr.toString().trim() };
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

	/** SHA-256 of a file, by the one name that all such files share. */
	digest(file: string): Record<string, string> {
		return { file: new Bun.CryptoHasher("sha256").update(readFileSync(this.path(file))).digest("hex") };
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
