/** Starts a run, lets it meet a fault, and looks at its end: in time, the right cause named, nothing left behind. */
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { executable } from "../commands/mimo.ts";
import { freePort, Launched } from "../launch/launched.ts";
import { book, describeFault, type Fault, type FaultSignal, type Layout, type Moment } from "./fault-plan.ts";

export interface Outcome {
	readonly about: string;
	readonly kind: Fault["kind"];
	/** From the fault to the end of the last process. */
	readonly seconds: number;
	/** The first line of the diagnosis. */
	readonly said: string;
	/** Faults found in a run's end; empty: all is well. */
	readonly problems: readonly string[];
}

/** Seconds from the fault to the end of all processes. */
const timeLimit = 10;
/** Seconds in which a run that ends by itself (a full disk) has come there and ended. */
const wholeLimit = 60;
const common = `--micro-batch-size 1 --global-batch-size 4 --lr-warmup-iters 1 --log-interval 1 --device cpu --threads 1`;
const long = "--micro-batch-size 8 --seq-length 1024 --global-batch-size 256";
/** Makes file systems of its own, also without being root. */
const namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c"];

export function canMount(): boolean {
	return (
		Bun.which("unshare") !== null &&
		Bun.spawnSync([...namespace, "mount -t tmpfs -o size=64k tmpfs /dev/shm"], { stderr: "ignore" }).success
	);
}

/** One run in a folder of its own, with everything it starts marked. */
class Scene implements Disposable {
	readonly folder = mkdtempSync(join(tmpdir(), "mimo-fault-"));
	readonly #mark = `MIMO_TEST_FAULT=${crypto.randomUUID()}`;
	readonly #temporary = join(this.folder, "temporary");

	constructor() {
		mkdirSync(this.#temporary);
	}

	get environment(): Record<string, string> {
		const [name, value] = this.#mark.split("=") as [string, string];
		return { [name]: value, TMPDIR: this.#temporary, MIMO_DEBUG: "0" };
	}

	get options() {
		return { cwd: this.folder, env: this.environment };
	}

	path(name: string): string {
		return join(this.folder, name);
	}

	/** Processes of the run that still live. */
	processes(): number[] {
		return readdirSync("/proc")
			.filter((name) => /^\d+$/.test(name))
			.map(Number)
			.filter((pid) => {
				try {
					// That of one that has ended is empty.
					return readFileSync(`/proc/${pid}/environ`).includes(this.#mark);
				} catch {
					return false;
				}
			});
	}

	/** Resolves when all have ended, or after some seconds more than they have. */
	async empty(seconds: number, spared: readonly number[] = []): Promise<void> {
		const end = performance.now() + (seconds + 15) * 1000;
		while (this.processes().some((pid) => !spared.includes(pid)) && performance.now() < end) await Bun.sleep(20);
	}

	/** A save is under way. */
	async saving(run: Launched): Promise<void> {
		while (run.process.exitCode === null) {
			if (existsSync(this.path("ck")) && readdirSync(this.path("ck")).some((name) => /^iter_.*tmp/.test(name))) return;
			await Bun.sleep(5);
		}
	}

	/** Everything that a run must not leave. */
	leftovers(): string[] {
		const left = this.processes().map((pid) => `process ${pid} lives`);
		const own = readdirSync("/dev/shm").filter((name) => name.startsWith("mimo-run-") && !aliveOwner(name));
		left.push(...own.map((name) => `/dev/shm/${name} is left`));
		left.push(...readdirSync(this.#temporary).map((name) => `${name} is left in the temporary folder`));
		return left;
	}

	/** Faults of the checkpoint that a run would go on from. */
	checkpointFault(): string[] {
		if (!existsSync(this.path("ck/latest.json"))) return [];
		try {
			using checkpoint = NativeCheckpoint.openExactly(this.path("ck"));
			checkpoint.verify();
			return [];
		} catch (error) {
			return [(error as Error).message];
		}
	}

	[Symbol.dispose](): void {
		for (const pid of this.processes()) {
			try {
				process.kill(pid, "SIGKILL");
			} catch {
				// It has ended meanwhile.
			}
		}
		rmSync(this.folder, { recursive: true, force: true });
	}
}

/** "mimo-run-PID-TIME": whether that process is at it. */
function aliveOwner(name: string): boolean {
	return existsSync(`/proc/${name.split("-")[2]}`);
}

function flagsFor(moment: Moment, layout: Layout): string {
	const save = "--save ck --save-interval 3 --keep 2";
	const more = {
		start: "",
		first: "",
		random: save,
		save,
		"async save": `${save} --async-save`,
		evaluation: "--eval-interval 3 --eval-iters 6",
		last: "--train-iters 12",
	}[moment];
	return `${layout.flags} ${common} ${moment === "last" ? "" : "--train-iters 100000"} ${more}`;
}

function command(flags: string): string[] {
	return [executable, "train", ...flags.split(" ").filter(Boolean)];
}

/** Resolves when the run is there; `reporter` prints the log. */
async function reach(scene: Scene, reporter: Launched, { moment, delay }: Fault): Promise<void> {
	switch (moment) {
		case "start":
			await Bun.sleep(400 * delay);
			break;
		case "first":
			await reporter.said(/^Training /m);
			await Bun.sleep(300 * delay);
			break;
		case "random":
			await reporter.said(/^Training /m);
			await Bun.sleep(2500 * delay);
			break;
		case "save":
		case "async save":
			await scene.saving(reporter);
			await Bun.sleep(50 * delay);
			break;
		case "evaluation":
			await reporter.said(/ iteration +3\//);
			await Bun.sleep(200 * delay);
			break;
		case "last":
			await reporter.said(/ iteration +11\//);
			await Bun.sleep(50 * delay);
			break;
	}
}

/**
 * A diagnosis's words about a rank that got a signal: where no process waits for the rank, the system may not tell how
 * it ended.
 */
function cause(signal: FaultSignal, told: boolean): string {
	if (signal === "SIGSTOP") return "it was stopped \\(SIGSTOP or SIGTSTP\\) for 5 s";
	return told ? `it was killed by ${signal}` : `(it was killed by ${signal}|its process has ended)`;
}

interface End {
	readonly seconds: number;
	readonly exitCodes: readonly (number | null)[];
	readonly stderr: string;
	/** No process was left to be hit. */
	readonly missed?: boolean;
}

/** Faults of an end; `codes`: the expected ones, null: any. */
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

/** Sends a signal; false: the process has ended. */
function hit(pid: number, signal: NodeJS.Signals): boolean {
	try {
		process.kill(pid, signal);
		return true;
	} catch {
		return false;
	}
}

/** A signal to a rank, or to the launcher, of a launched run. */
async function hitLaunched(scene: Scene, fault: Fault, flags: string, wrapper: readonly string[] = []): Promise<End> {
	const run = Launched.run([...wrapper, ...command(flags)], scene.options);
	const { ranks } = fault.layout;
	await run.said(new RegExp(`^rank ${ranks - 1}: pid \\d+`, "m"));
	if (fault.kind === "computing") {
		await run.said(/^Training /m);
		await Bun.sleep(500 + 1000 * fault.delay);
	} else await reach(scene, run, fault);
	const launcher = run.process.pid;
	const behind = fault.kind === "launcher stopped";
	const victim = fault.kind === "launcher" ? launcher : run.pids[fault.victim]!;
	if (behind) hit(launcher, "SIGSTOP");
	const began = performance.now();
	const missed = !hit(victim, fault.signal);
	await scene.empty(timeLimit, behind ? [launcher] : []);
	const seconds = (performance.now() - began) / 1000;
	if (behind) hit(launcher, "SIGCONT");
	const ended = await run.end();
	return { seconds, exitCodes: [ended.exitCode], stderr: ended.stderr, missed: missed || ended.exitCode === 0 };
}

/** A signal to a rank of a run that torchrun's variables brought together. */
async function hitAlone(scene: Scene, fault: Fault, flags: string): Promise<End> {
	const { ranks } = fault.layout;
	const port = String(await freePort());
	const runs = Array.from({ length: ranks }, (_, rank) =>
		Launched.run(command(flags), {
			cwd: scene.folder,
			env: {
				...scene.environment,
				RANK: String(rank),
				WORLD_SIZE: String(ranks),
				LOCAL_RANK: String(rank),
				MASTER_ADDR: "127.0.0.1",
				MASTER_PORT: port,
			},
		}),
	);
	if (fault.kind === "computing") {
		await runs.at(-1)!.said(/^Training /m);
		await Bun.sleep(500 + 1000 * fault.delay);
	} else await reach(scene, runs.at(-1)!, fault);
	const began = performance.now();
	const missed = !hit(runs[fault.victim]!.process.pid, fault.signal);
	await scene.empty(timeLimit);
	const seconds = (performance.now() - began) / 1000;
	const ended = await Promise.all(runs.map((run) => run.end()));
	return {
		seconds,
		exitCodes: ended.map(({ exitCode }) => exitCode),
		stderr: ended.map(({ stderr }) => stderr).join(""),
		missed: missed || ended.every(({ exitCode }, rank) => exitCode === 0 || rank === fault.victim),
	};
}

/** A run that meets its end by itself. */
async function untilItsEnd(scene: Scene, line: readonly string[]): Promise<End> {
	const began = performance.now();
	const run = Launched.run(line, scene.options);
	const ended = await run.end();
	await scene.empty(timeLimit);
	return { seconds: (performance.now() - began) / 1000, exitCodes: [ended.exitCode], stderr: ended.stderr };
}

/** A terminal that is closed while a run writes to it. */
async function closeTerminal(scene: Scene, fault: Fault, flags: string): Promise<End> {
	let text = "";
	const decoder = new TextDecoder();
	const terminal = new Bun.Terminal({
		cols: 200,
		rows: 50,
		data: (_, bytes) => {
			text += decoder.decode(bytes, { stream: true });
		},
	});
	// Sessions end with their terminal: it has to be one of its own.
	const run = Bun.spawn(["setsid", "--ctty", ...command(flags)], {
		cwd: scene.folder,
		env: { ...process.env, ...scene.environment },
		terminal,
	});
	const end = performance.now() + 30_000;
	while (!/ iteration +1\//.test(text) && performance.now() < end && run.exitCode === null) await Bun.sleep(20);
	await Bun.sleep(1500 * fault.delay);
	const began = performance.now();
	terminal.close();
	await scene.empty(timeLimit);
	const seconds = (performance.now() - began) / 1000;
	await run.exited;
	return { seconds, exitCodes: [], stderr: / iteration +1\//.test(text) ? "" : `It never began: ${text}` };
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

async function meet(scene: Scene, fault: Fault): Promise<{ readonly end: End; readonly problems: string[] }> {
	const { layout, moment, signal, victim } = fault;
	const flags = flagsFor(moment, layout);
	const named = (told: boolean) => new RegExp(`^mimo: rank ${victim} \\(.* failed: ${cause(signal, told)} `);
	const judged = (end: End, expected: RegExp | null, codes: readonly (number | null)[], limit = timeLimit) => ({
		end,
		problems: judge(scene, end, expected, codes, limit),
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
		case "disk": {
			mkdirSync(scene.path("ck"));
			const size = Math.ceil((1.3 + 0.5 * fault.delay) * bytesOfCheckpoint(layout));
			const script = `mount -t tmpfs -o size=${size} tmpfs ck && exec "$@"`;
			const end = await untilItsEnd(scene, [...namespace, script, "sh", ...command(flagsFor("save", layout))]);
			const sentence = /failed: The checkpoint of step \d+ was not saved: .*no space left on the device/;
			return judged(end, sentence, [1], wholeLimit);
		}
		case "large file": {
			// Larger than the embedded library, smaller than a rank's part of this model.
			const large = `${flags} --hidden-size 512 --llm-dp 2 --llm-tp 1 --llm-ep 1 --save ck --save-interval 1`;
			const line = ["bash", "-c", 'ulimit -f 30000 && exec "$@"', "bash"];
			const text = large.replace(layout.flags, `--preset nemotron-tiny --data-path ${book} --seq-length 32`);
			const end = await untilItsEnd(scene, [...line, ...command(text)]);
			return judged(end, /failed: The checkpoint of step 1 was not saved: .*ulimit -f allows/, [1], wholeLimit);
		}
		case "shared memory": {
			const script = `mount -t tmpfs -o size=${fault.delay < 0.5 ? "64k" : "900k"} tmpfs /dev/shm && exec "$@"`;
			const end = await untilItsEnd(scene, [...namespace, script, "sh", ...command(flags)]);
			return judged(end, /\/dev\/shm is full: .* needs \S+ MB, \S+ MB of \S+ MB are free/, [1], wholeLimit);
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
