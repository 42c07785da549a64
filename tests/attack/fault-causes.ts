/** Starts runs and causes their faults. */
import { deviceFlags, executable } from "../commands/mimo.ts";
import { freePort, Launched } from "../launch/launched.ts";
import type { Fault, Layout, Moment } from "./fault-plan.ts";
import type { Scene } from "./fault-scene.ts";

/** Most seconds from a fault to the end of all processes. */
export const timeLimit = 10;
/** Flags of every run. */
export const common = `--micro-batch-size 1 --global-batch-size 4 --lr-warmup-iters 1 --log-interval 1 --threads 1 ${deviceFlags}`;

/** Flags of a run that reaches the moment. */
export function flagsFor(moment: Moment, layout: Layout): string {
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

export function command(flags: string): string[] {
	return [executable, "train", ...flags.split(" ").filter(Boolean)];
}

/** The end of a run. */
export interface End {
	/** From the fault, or the start of a run that fails by itself, to the end of the last process. */
	readonly seconds: number;
	readonly exitCodes: readonly (number | null)[];
	readonly stderr: string;
	/** The run was over before the fault. */
	readonly missed?: boolean;
}

/** Resolves when the run has reached the moment and the delay after it is over; `reporter` prints the log. */
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

/** Sends a signal; false where the process has ended already. */
function hit(pid: number, signal: NodeJS.Signals): boolean {
	try {
		process.kill(pid, signal);
		return true;
	} catch {
		return false;
	}
}

/** Sends the signal to a rank, or to the launcher, of a launched run; `wrapper`: a command that the run starts under. */
export async function hitLaunched(
	scene: Scene,
	fault: Fault,
	flags: string,
	wrapper: readonly string[] = [],
): Promise<End> {
	const run = Launched.run([...wrapper, ...command(flags)], scene.options);
	const { ranks } = fault.layout;
	await run.said(new RegExp(`^rank ${ranks - 1}: pid \\d+`, "m"));
	if (fault.kind === "computing") {
		await run.said(/^Training /m);
		await Bun.sleep(500 + 1000 * fault.delay);
	} else await reach(scene, run, fault);
	const launcher = run.process.pid;
	const stopped = fault.kind === "launcher stopped";
	const victim = fault.kind === "launcher" ? launcher : run.pids[fault.victim]!;
	if (stopped) hit(launcher, "SIGSTOP");
	const began = performance.now();
	const missed = !hit(victim, fault.signal);
	await scene.empty(timeLimit, stopped ? [launcher] : []);
	const seconds = (performance.now() - began) / 1000;
	if (stopped) hit(launcher, "SIGCONT");
	const ended = await run.end();
	return { seconds, exitCodes: [ended.exitCode], stderr: ended.stderr, missed: missed || ended.exitCode === 0 };
}

/** Sends the signal to a rank of a run that torchrun's variables have brought together. */
export async function hitAlone(scene: Scene, fault: Fault, flags: string): Promise<End> {
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

/** Starts a command, which fails by itself. */
export async function untilItsEnd(scene: Scene, line: readonly string[]): Promise<End> {
	const began = performance.now();
	const run = Launched.run(line, scene.options);
	const ended = await run.end();
	await scene.empty(timeLimit);
	return { seconds: (performance.now() - began) / 1000, exitCodes: [ended.exitCode], stderr: ended.stderr };
}

/** Closes the terminal to which a run writes. */
export async function closeTerminal(scene: Scene, fault: Fault, flags: string): Promise<End> {
	let text = "";
	const decoder = new TextDecoder();
	const terminal = new Bun.Terminal({
		cols: 200,
		rows: 50,
		data: (_, bytes) => {
			text += decoder.decode(bytes, { stream: true });
		},
	});
	// Closing a terminal ends its session, so the run gets its own.
	const run = Bun.spawn(["setsid", "--ctty", ...command(flags)], {
		cwd: scene.folder,
		env: { ...process.env, ...scene.environment },
		terminal,
	});
	const end = performance.now() + 30_000;
	while (!/iteration +1\//.test(text) && performance.now() < end && run.exitCode === null) await Bun.sleep(20);
	await Bun.sleep(1500 * fault.delay);
	const began = performance.now();
	terminal.close();
	await scene.empty(timeLimit);
	const seconds = (performance.now() - began) / 1000;
	await run.exited;
	return { seconds, exitCodes: [], stderr: /iteration +1\//.test(text) ? "" : `It never began: ${text}` };
}
