/** Lets a run meet a fault and judges its end: in time, the right cause named, nothing left behind. */
import { mkdirSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import {
	closeTerminal,
	command,
	common,
	type End,
	flagsFor,
	hitAlone,
	hitLaunched,
	timeLimit,
	untilItsEnd,
} from "./fault-causes.ts";
import { book, describeFault, type Fault, type FaultSignal, type Layout } from "./fault-plan.ts";
import { namespace, Scene } from "./fault-scene.ts";

export interface Outcome {
	readonly about: string;
	readonly kind: Fault["kind"];
	/** From the fault to the end of the last process. */
	readonly seconds: number;
	/** First line of the diagnosis. */
	readonly said: string;
	/** What is wrong with the run's end; empty: nothing. */
	readonly problems: readonly string[];
}

/** Most seconds from the start to the end of a run that fails by itself. */
const wholeLimit = 60;
/** A step of many seconds. */
const long = "--micro-batch-size 8 --seq-length 1024 --global-batch-size 256";

/**
 * A diagnosis's words about a rank that got a signal: where no process waits for the rank, the system may not tell how
 * it ended.
 */
function cause(signal: FaultSignal, told: boolean): string {
	if (signal === "SIGSTOP") return "it was stopped \\(SIGSTOP or SIGTSTP\\) for 5 s";
	return told ? `it was killed by ${signal}` : `(it was killed by ${signal}|its process has ended)`;
}

/** What is wrong with an end. `expected`: the cause, null for a run without a diagnosis; `codes`: the exit codes. */
function judge(
	scene: Scene,
	end: End,
	expected: RegExp | null,
	codes: readonly (number | null)[],
	limit: number,
): string[] {
	const said = end.stderr.match(/^mimo: .*$/gm) ?? [];
	const problems = [...scene.leftovers(), ...scene.checkpointFault()];
	if (end.seconds > limit) problems.push(`it took ${end.seconds.toFixed(1)} s`);
	if (expected !== null && !expected.test(said[0] ?? "")) problems.push(`the cause is not ${expected}: ${end.stderr}`);
	if (expected !== null && said.length > 1) problems.push(`${said.length} diagnoses: ${said.join(" ")}`);
	if (/Unexpected error|^\s+at /m.test(end.stderr)) problems.push(end.stderr);
	if (end.exitCodes.some((code, index) => codes[index] !== code)) {
		problems.push(`exit codes ${end.exitCodes.join(", ")} instead of ${codes.join(", ")}`);
	}
	return problems;
}

/** Bytes of a checkpoint of each layout. */
const checkpointBytes = new Map<Layout, number>();

function bytesOfCheckpoint(layout: Layout): number {
	const known = checkpointBytes.get(layout);
	if (known !== undefined) return known;
	using scene = new Scene();
	const flags = `${layout.flags} ${common} --train-iters 2 --save ck --save-interval 2`;
	Bun.spawnSync(command(flags), { cwd: scene.folder, stdout: "ignore", stderr: "inherit" });
	const files = readdirSync(scene.path("ck"), { recursive: true }) as string[];
	const bytes = files.reduce((sum, file) => sum + statSync(join(scene.path("ck"), file)).size, 0);
	checkpointBytes.set(layout, bytes);
	return bytes;
}

interface Judged {
	readonly end: End;
	readonly problems: string[];
}

async function meet(scene: Scene, fault: Fault): Promise<Judged> {
	const { layout, moment, signal, victim } = fault;
	const flags = flagsFor(moment, layout);
	const named = (told: boolean) => new RegExp(`^mimo: rank ${victim} \\(.* failed: ${cause(signal, told)} `);
	const judged = (end: End, expected: RegExp | null, codes: readonly (number | null)[]) => ({
		end,
		problems: judge(scene, end, expected, codes, timeLimit),
	});
	switch (fault.kind) {
		case "rank":
			return judged(await hitLaunched(scene, fault, flags), named(true), [1]);
		case "few descriptors": {
			const wrapper = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh"];
			return judged(await hitLaunched(scene, fault, flags, wrapper), named(true), [1]);
		}
		case "alone":
		case "computing": {
			if (fault.kind === "computing" && fault.delay < 0.5) {
				return judged(await hitLaunched(scene, fault, `${flags} ${long}`), named(true), [1]);
			}
			const end = await hitAlone(scene, fault, fault.kind === "alone" ? flags : `${flags} ${long}`);
			return judged(
				end,
				named(false),
				end.exitCodes.map((_, rank) => (rank === victim ? null : 69)),
			);
		}
		case "launcher": {
			const end = await hitLaunched(scene, fault, flags);
			const asked = /^mimo: The run was interrupted by SIGTERM\.$/;
			return signal === "SIGTERM" ? judged(end, asked, [143]) : judged(end, null, [null]);
		}
		case "launcher stopped":
			return judged(await hitLaunched(scene, fault, flags), named(true), [1]);
		case "terminal": {
			const end = await closeTerminal(scene, fault, flagsFor("random", layout));
			return { end, problems: [...judge(scene, end, null, [], timeLimit), ...(end.stderr === "" ? [] : [end.stderr])] };
		}
		case "disk":
		case "large file":
		case "shared memory":
			return await meetLimit(scene, fault, fault.kind);
	}
}

/** Gives a run less room than it needs: on the disk, in a file, in shared memory. */
async function meetLimit(
	scene: Scene,
	{ layout, moment, delay }: Fault,
	kind: "disk" | "large file" | "shared memory",
): Promise<Judged> {
	const flags = flagsFor(moment, layout);
	const judged = async (line: readonly string[], expected: RegExp) => {
		const end = await untilItsEnd(scene, line);
		return { end, problems: judge(scene, end, expected, [1], wholeLimit) };
	};
	switch (kind) {
		case "disk": {
			mkdirSync(scene.path("ck"));
			const size = Math.ceil((1.3 + 0.5 * delay) * bytesOfCheckpoint(layout));
			const script = `mount -t tmpfs -o size=${size} tmpfs ck && exec "$@"`;
			return await judged(
				[...namespace, script, "sh", ...command(flagsFor("save", layout))],
				/failed: The checkpoint of step \d+ was not saved: .*no space left on the device/,
			);
		}
		case "large file": {
			// Larger than the embedded library, smaller than a rank's part of this model.
			const limited = ["bash", "-c", 'ulimit -f 30000 && exec "$@"', "bash"];
			const large = `${flags} --hidden-size 512 --llm-dp 2 --llm-tp 1 --llm-ep 1 --save ck --save-interval 1`;
			const text = large.replace(layout.flags, `--preset nemotron-tiny --data-path ${book} --seq-length 32`);
			return await judged(
				[...limited, ...command(text)],
				/failed: The checkpoint of step 1 was not saved: .*ulimit -f allows/,
			);
		}
		case "shared memory": {
			const script = `mount -t tmpfs -o size=${delay < 0.5 ? "64k" : "900k"} tmpfs /dev/shm && exec "$@"`;
			return await judged(
				[...namespace, script, "sh", ...command(flags)],
				/\/dev\/shm is full: .* needs \S+ MB, \S+ MB of \S+ MB are free/,
			);
		}
	}
}

/** Lets a run meet the fault. A run that was over before the fault meets it again, at an earlier moment. */
export async function meetFault(fault: Fault): Promise<Outcome> {
	using scene = new Scene();
	const about = describeFault(fault);
	try {
		const { end, problems } = await meet(scene, fault);
		if (end.missed && fault.moment === "last") return await meetFault({ ...fault, moment: "random" });
		const said = /^mimo: .*$/m.exec(end.stderr)?.[0] ?? "";
		return { about, kind: fault.kind, seconds: end.seconds, said, problems };
	} catch (error) {
		return { about, kind: fault.kind, seconds: Number.NaN, said: "", problems: [(error as Error).message] };
	}
}
