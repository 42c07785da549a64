/**
 * Faults in runs that restart in their job: each run meets one fault after the other and goes on to its end. Its losses, gradient
 * norms and last checkpoint are compared, bit by bit, with those of a run without faults.
 *
 *   bun tests/attack/restarts.ts [--count 200] [--seed 1] [--each 20]
 */
import { existsSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { Launched } from "../launch/launched.ts";
import { command, common } from "./fault-causes.ts";
import { book, type Layout, layouts, numbers } from "./fault-plan.ts";
import { Scene } from "./fault-scene.ts";

/**
 * kill, crash, stop: a signal to a rank. error: of rank 0, which cannot save for a moment. two ranks, all ranks: killed together. again: another rank is killed while the first is replaced. launcher: killed, and the command is given again.
 */
const causes = ["kill", "crash", "two ranks", "stop", "error", "again", "all ranks", "launcher"] as const;
export type RestartCause = (typeof causes)[number];

const words = (more: string) => `--preset nemotron-tiny --data-path ${book} --hidden-size 64 --seq-length 32 ${more}`;
/** Layouts with states of other kinds: masters apart from their values, frozen weights, moments in bf16, evaluations, a single rank. */
export const kinds: readonly Layout[] = [
	{
		name: "pp2dp2, bf16, ZeRO-1, evaluations",
		flags: words(
			"--hybrid-layer-pattern M*-|ME- --llm-pp 2 --llm-dp 2 --bf16 --use-distributed-optimizer --eval-iters 1 --eval-interval 3",
		),
		ranks: 4,
	},
	{ name: "dp2, adapters", flags: words("--llm-dp 2 --lora-rank 4"), ranks: 2 },
	{ name: "tp2, bf16 moments", flags: words("--llm-tp 2 --bf16 --exp-avg-dtype bf16 --grad-reduce-in-bf16"), ranks: 2 },
	{ name: "one rank, asynchronous saves", flags: words("--async-save"), ranks: 1 },
	{
		name: "1+dp2, frozen tower",
		flags:
			"--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 32 --freeze-vit --llm-dp 2",
		ranks: 3,
	},
];

/** How often a cause comes among twenty. */
const shares: Readonly<Record<RestartCause, number>> = {
	kill: 8,
	crash: 4,
	"two ranks": 2,
	stop: 1,
	error: 1,
	again: 2,
	"all ranks": 1,
	launcher: 1,
};

export interface Recovery {
	readonly cause: RestartCause;
	/** From the fault to the end of the next step; NaN: the run never went on. */
	readonly seconds: number;
	/** Steps that every rank had finished and that were done again. */
	readonly lost: number;
}

interface Met {
	readonly recoveries: readonly Recovery[];
	/** What is wrong with the run; empty: nothing. */
	readonly problems: readonly string[];
}

/** Most seconds until a run goes on. */
const longest = 30;
const crashes = ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGTERM"] as const;
/** Steps between two faults, and behind the last. */
const gap = 4;

/** A part of the book: less to evaluate in the end. */
const text = "text.txt";

/** Flags of a run with room for `faults` faults. */
function flagsOf(layout: Layout, name: string, faults: number): string {
	const steps = gap * (faults + 1);
	const saves = `--save ${name} --load ${name} --save-interval ${gap} --keep 1`;
	return `${layout.flags.replace(book, text)} ${common} --train-iters ${steps} --lr-decay-iters 1000 ${saves} --log-json ${name}.jsonl`;
}

/** What a log says: the values of every step, and the latest step. */
function readSteps(file: string): { values: Map<number, string>; last: number; contradictions: string[] } {
	const values = new Map<number, string>();
	const contradictions: string[] = [];
	let last = 0;
	for (const line of existsSync(file) ? readFileSync(file, "utf8").trim().split("\n") : []) {
		const { iteration, event, split, grad_norm: norm, consumed_samples: consumed, ...rest } = JSON.parse(line || "{}");
		if (iteration === undefined || event !== undefined || split !== undefined) continue;
		const value = JSON.stringify([rest["lm loss"], norm, consumed, rest.learning_rate, rest.tokens]);
		if ((values.get(iteration) ?? value) !== value)
			contradictions.push(`step ${iteration} was ${values.get(iteration)}, then ${value}`);
		values.set(iteration, value);
		last = iteration;
	}
	return { values, last, contradictions };
}

/** Lines of a log so far, of steps alone. */
function countSteps(file: string): number {
	return existsSync(file) ? (readFileSync(file, "utf8").match(/^\{"iteration":\d+,"consumed/gm)?.length ?? 0) : 0;
}

function digests(folder: string): string[] {
	using checkpoint = NativeCheckpoint.open(folder);
	return [...checkpoint.tensors.keys()].map(
		(name) =>
			`${name} ${new Bun.CryptoHasher("sha256").update(readTensor(checkpoint, name) as Float32Array).digest("hex")}`,
	);
}

/** A run, and a second start of it after its launcher was killed. */
class FaultedRun {
	#run: Launched;
	readonly #log: string;
	/** What it said when it did not go on. */
	readonly stops: string[] = [];

	constructor(
		private readonly scene: Scene,
		private readonly flags: string,
		private readonly random: () => number,
	) {
		this.#run = Launched.run(command(flags), scene.options);
		this.#log = scene.path("faulted.jsonl");
	}

	/** Lets the run meet a fault a few steps from now. */
	async meet(cause: RestartCause): Promise<Recovery> {
		const before = countSteps(this.#log);
		await this.#until(() => countSteps(this.#log) >= before + 2, longest);
		await Bun.sleep(60 * this.random());
		const restarts = this.#restarts();
		// Every rank has finished the steps before the last that is in the log.
		let finished = readSteps(this.#log).last - 1;
		let began = performance.now();
		await this.#cause(cause);
		if (cause === "error") [began, finished] = [performance.now(), readSteps(this.#log).last - 1];
		if (cause !== "launcher") await this.#until(() => this.#restarts() > restarts, longest);
		const seen = this.#starts();
		const lines = countSteps(this.#log);
		await this.#until(() => countSteps(this.#log) > lines, longest);
		const seconds = countSteps(this.#log) > lines ? (performance.now() - began) / 1000 : Number.NaN;
		if (Number.isNaN(seconds)) this.stops.push(`after ${cause} it did not go on: ${this.#run.errors.slice(-3000)}`);
		const from = this.#starts().at(-1) ?? seen.at(-1) ?? 0;
		return { cause, seconds, lost: Math.max(0, finished - from) };
	}

	async end() {
		return await this.#run.end();
	}

	get #pids(): number[] {
		const latest = new Map<number, number>();
		for (const [, rank, pid] of this.#run.output.matchAll(/^rank (\d+): pid (\d+)/gm))
			latest.set(Number(rank), Number(pid));
		return [...latest.values()];
	}

	#restarts(): number {
		return [...this.#run.errors.matchAll(/^mimo: Restart \d+ of at most/gm)].length;
	}

	/** The steps after which the starts so far went on. */
	#starts(): number[] {
		return [...readFileSync(this.#log, "utf8").matchAll(/^\{"event":"start","step":(\d+)/gm)].map(([, step]) =>
			Number(step),
		);
	}

	async #cause(cause: RestartCause): Promise<void> {
		const pids = this.#pids;
		const first = Math.floor(pids.length * this.random());
		const victim = pids[first]!;
		const other = pids[(first + 1 + Math.floor((pids.length - 1) * this.random())) % pids.length]!;
		const { pid: launcher } = this.#run.process;
		switch (cause) {
			case "kill":
				return hit(victim, "SIGKILL");
			case "crash":
				return hit(victim, crashes[Math.floor(crashes.length * this.random())]!);
			case "stop":
				return hit(victim, "SIGSTOP");
			case "two ranks":
				hit(victim, "SIGKILL");
				return hit(other, "SIGKILL");
			case "all ranks":
				for (const pid of pids) hit(pid, "SIGKILL");
				return;
			case "error":
				return await this.#failToSave();
			case "again":
				hit(victim, "SIGKILL");
				await Bun.sleep(800 * this.random());
				return hit(other, "SIGKILL");
			case "launcher":
				hit(launcher, "SIGKILL");
				await this.#run.end();
				await this.scene.empty(10);
				this.#run = Launched.run(command(this.flags), this.scene.options);
		}
	}

	/** Puts a file in the place of the folder of checkpoints, until a rank has failed of it. */
	async #failToSave(): Promise<void> {
		const [folder, away] = [this.scene.path("faulted"), this.scene.path("away")];
		const said = () => this.#run.errors.match(/^mimo: rank \d+ .* failed: /gm)?.length ?? 0;
		const before = said();
		renameSync(folder, away);
		writeFileSync(folder, "");
		await this.#until(() => said() > before, longest);
		rmSync(folder);
		renameSync(away, folder);
	}

	async #until(condition: () => boolean, seconds: number): Promise<void> {
		const end = performance.now() + 1000 * seconds;
		while (!condition() && performance.now() < end && this.#run.process.exitCode === null) await Bun.sleep(20);
	}
}

/** Sends a signal to a process, if it still lives. */
function hit(pid: number, signal: NodeJS.Signals): void {
	try {
		process.kill(pid, signal);
	} catch {
		// It has ended meanwhile.
	}
}

/** Lets one run meet the faults, in order. `copies`: it keeps its state after every step, not only in checkpoints. */
export async function meetRestarts(
	layout: Layout,
	faults: readonly RestartCause[],
	{ seed, spares, copies = true }: { readonly seed: number; readonly spares: number; readonly copies?: boolean },
): Promise<Met> {
	using scene = new Scene();
	writeFileSync(scene.path(text), readFileSync(book, "utf8").slice(0, 30_000));
	const whole = Launched.run(command(flagsOf(layout, "whole", faults.length)), scene.options);
	const ended = await whole.end();
	if (ended.exitCode !== 0) throw new Error(ended.stderr);
	const keeps = `--max-restarts 10000 --spares ${spares}${copies ? " --non-persistent-save-interval 1" : ""}`;
	const run = new FaultedRun(scene, `${flagsOf(layout, "faulted", faults.length)} ${keeps}`, numbers(seed));
	const recoveries: Recovery[] = [];
	for (const cause of faults) recoveries.push(await run.meet(cause));
	const { exitCode, stderr, stdout } = await run.end();
	const problems = scene.leftovers();
	if (exitCode !== 0) problems.push(`exit code ${exitCode}: ${stderr.slice(-2000)}${stdout.slice(-500)}`);
	problems.push(...run.stops);
	const [expected, got] = [readSteps(scene.path("whole.jsonl")), readSteps(scene.path("faulted.jsonl"))];
	problems.push(...got.contradictions);
	for (const [step, value] of expected.values) {
		if (got.values.get(step) !== value) problems.push(`step ${step} is ${got.values.get(step)} instead of ${value}`);
	}
	if (exitCode === 0 && digests(scene.path("faulted")).join("\n") !== digests(scene.path("whole")).join("\n")) {
		problems.push("the last checkpoint differs");
	}
	return { recoveries, problems };
}

/** `count` causes by their shares, in an order drawn from `random`. */
export function drawCauses(count: number, random: () => number): RestartCause[] {
	const deck = causes.flatMap((cause) => Array<RestartCause>(shares[cause]).fill(cause));
	return Array.from({ length: count }, () => deck[Math.floor(random() * deck.length)]!);
}

function quantile(values: readonly number[], share: number): number {
	const sorted = values.toSorted((a, b) => a - b);
	return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)] ?? Number.NaN;
}

function table(all: readonly Recovery[]): string {
	const row = (name: string, some: readonly Recovery[]) => {
		const seconds = some.map((one) => one.seconds);
		const cells = [quantile(seconds, 0.5), quantile(seconds, 0.99), Math.max(...seconds)].map((value) =>
			value.toFixed(2),
		);
		const lost = some.map((one) => one.lost);
		return [name, some.length, ...cells, lost.reduce((sum, value) => sum + value, 0)].join("\t");
	};
	return [
		"fault\tnumber\tmedian s\t99 % s\tmost s\tsteps lost",
		...[...Map.groupBy(all, ({ cause }) => cause)].map(([cause, some]) => row(cause, some)),
		row("all", all),
	].join("\n");
}

if (import.meta.main) {
	const { values } = parseArgs({
		options: {
			count: { type: "string", default: "200" },
			seed: { type: "string", default: "1" },
			each: { type: "string", default: "20" },
			only: { type: "string" },
		},
	});
	const random = numbers(Number(values.seed));
	const all: Recovery[] = [];
	let wrong = 0;
	const four = layouts.filter(({ ranks }) => ranks === 4);
	for (let run = 0; all.length < Number(values.count); run++) {
		const layout = four[run % four.length]!;
		const number = Math.min(Number(values.each), Number(values.count) - all.length);
		const drawn = drawCauses(number, random);
		const faults = values.only === undefined ? drawn : drawn.map(() => values.only as RestartCause);
		const { recoveries, problems } = await meetRestarts(layout, faults, {
			seed: Number(values.seed) + run,
			spares: run % 2,
		});
		all.push(...recoveries);
		wrong += problems.length > 0 ? 1 : 0;
		console.log(
			`${problems.length === 0 ? "ok" : "WRONG"} ${layout.name}: ${recoveries.map(({ cause, seconds, lost }) => `${cause} ${seconds.toFixed(2)}${lost > 0 ? ` (lost ${lost})` : ""}`).join(", ")}`,
		);
		for (const problem of problems) console.log(`  ${problem}`);
	}
	console.log(`\n${table(all)}\n${wrong} runs went wrong`);
	process.exit(wrong === 0 ? 0 : 1);
}
