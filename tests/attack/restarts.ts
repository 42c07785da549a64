/**
 * Faults in runs that restart in their job: each run meets one fault after the other and goes on to its end. Its losses, gradient
 * norms and last checkpoint are compared, bit by bit, with those of a run without faults.
 *
 *   bun tests/attack/restarts.ts [--count 200] [--seed 1] [--each 20] [--hosts 3] [--ranks 4] [--only CAUSE]
 *
 * --ranks: 2 or 4. With MIMO_TEST_DEVICE=cuda ranks train on GPUs, and with MIMO_TEST_BACKEND=shm they share those that are there.
 */
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { Launched } from "../launch/launched.ts";
import { command, common } from "./fault-causes.ts";
import { book, type Layout, layouts, numbers } from "./fault-plan.ts";
import { Scene } from "./fault-scene.ts";
import { agree, canLimitMemory, FaultedRun, type Recovery, type RestartCause, readSteps } from "./faulted-run.ts";
import { attackFlags, tableOf } from "./summary.ts";
import { canTurnBits } from "./wrong-bit.ts";

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

/** How often a cause comes among about twenty, on one host and on three. */
const shares: Readonly<Record<"one" | "three", Readonly<Partial<Record<RestartCause, number>>>>> = {
	one: {
		kill: 5,
		crash: 3,
		"two ranks": 2,
		stop: 1,
		error: 1,
		memory: 1,
		again: 2,
		"all ranks": 1,
		launcher: 1,
		"wrong result": 3,
	},
	three: {
		kill: 5,
		crash: 3,
		"two ranks": 1,
		stop: 1,
		error: 1,
		memory: 1,
		again: 1,
		"all ranks": 1,
		"wrong result": 2,
		host: 3,
		cut: 2,
		slow: 1,
	},
};

interface Met {
	readonly recoveries: readonly Recovery[];
	/** What is wrong with the run; empty: nothing. */
	readonly problems: readonly string[];
}

/** Most wrong results of a run on three hosts: a host that has had two gets no ranks any more, and one host is spare. */
const mostWrongResults = 2;

/** Steps between two saves, and least steps between two faults, on one host and where a host has to come back. */
const saveInterval = 4;
const gaps = { one: 4, several: 16 };
/** Steps more until a turned bit is one that counts. */
const bitGap = 12;

/** A part of the book: less to evaluate in the end. */
const text = "text.txt";

/** Flags of a run with room for faults. */
function flagsOf(layout: Layout, name: string, faults: readonly RestartCause[], hosts: number): string {
	const bits = faults.filter((cause) => cause === "wrong result").length;
	const steps = (hosts > 1 ? gaps.several : gaps.one) * (faults.length + 1) + bitGap * bits;
	const saves = `--save ${name} --load ${name} --save-interval ${saveInterval} --keep 1`;
	return `${layout.flags.replace(book, text)} ${common} --train-iters ${steps} --lr-decay-iters 1000 ${saves} --log-json ${name}.jsonl`;
}

function digests(folder: string): string[] {
	using checkpoint = NativeCheckpoint.open(folder);
	return [...checkpoint.tensors.keys()].map(
		(name) =>
			`${name} ${new Bun.CryptoHasher("sha256").update(readTensor(checkpoint, name) as Float32Array).digest("hex")}`,
	);
}

/**
 * Lets one run meet the faults, in order. `copies`: it keeps its state after every step, not only in checkpoints. `minLanes`: it goes
 * on with fewer lanes without a lost host, and its values are those of the run without faults but for `tolerance`, a share of them.
 */
export async function meetRestarts(
	layout: Layout,
	faults: readonly RestartCause[],
	options: {
		readonly seed: number;
		readonly spares: number;
		readonly copies?: boolean;
		readonly hosts?: number;
		readonly minLanes?: number;
		readonly tolerance?: number;
		/** Whether checkpoints have a small disk of their own, and one that cannot be saved is only said. */
		readonly smallDisk?: boolean;
	},
): Promise<Met> {
	const { seed, spares, copies = true, hosts = 1, minLanes, tolerance = 0, smallDisk = false } = options;
	using scene = new Scene();
	using _disk = smallDisk ? new SmallDisk(scene.path("faulted")) : null;
	writeFileSync(scene.path(text), readFileSync(book, "utf8").slice(0, 30_000));
	const whole = Launched.run(command(flagsOf(layout, "whole", faults, hosts)), scene.options);
	const ended = await whole.end();
	if (ended.exitCode !== 0) throw new Error(ended.stderr);
	const copying = ` --non-persistent-save-interval 1${hosts > 1 ? " --replication" : ""}`;
	const lanes = minLanes === undefined ? "" : ` --min-lanes ${minLanes}`;
	const checks = `--check-weight-hash-across-dp-replicas-interval 1${smallDisk ? " --save-retry" : ""}`;
	const keeps = `--max-restarts 10000 --spares ${spares}${copies ? copying : ""}${lanes} ${checks}`;
	using run = new FaultedRun(
		scene,
		`${flagsOf(layout, "faulted", faults, hosts)} ${keeps}`,
		hosts,
		numbers(seed),
		saveInterval,
	);
	const recoveries: Recovery[] = [];
	for (const cause of faults) {
		const recovery = run.stops.length === 0 ? await run.meet(cause) : null;
		if (recovery !== null) recoveries.push(recovery);
	}
	const { exitCode, text: said } = await run.end();
	const problems = scene.leftovers();
	if (exitCode !== 0) problems.push(`exit code ${exitCode}: ${said}`);
	problems.push(...run.stops);
	const [expected, got] = ["whole.jsonl", "faulted.jsonl"].map((log) => readSteps(scene.path(log), tolerance)) as [
		ReturnType<typeof readSteps>,
		ReturnType<typeof readSteps>,
	];
	problems.push(...got.contradictions);
	for (const [step, value] of exitCode === 0 ? expected.values : []) {
		if (!agree(got.values.get(step), value, tolerance))
			problems.push(`step ${step} is ${got.values.get(step)} instead of ${value}`);
	}
	if (
		exitCode === 0 &&
		tolerance === 0 &&
		digests(scene.path("faulted")).join("\n") !== digests(scene.path("whole")).join("\n")
	) {
		problems.push("the last checkpoint differs");
	}
	return { recoveries, problems };
}

/** A file system of 64 MB in memory. */
class SmallDisk implements Disposable {
	constructor(private readonly folder: string) {
		mkdirSync(folder);
		if (!Bun.spawnSync(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]).success)
			throw new Error(`No file system can be mounted at ${folder}.`);
	}

	[Symbol.dispose](): void {
		Bun.spawnSync(["umount", "--lazy", this.folder]);
	}
}

/** `count` causes by their shares, in an order drawn from `random`. */
export function drawCauses(count: number, random: () => number, hosts: "one" | "three" = "one"): RestartCause[] {
	const entries = Object.entries(shares[hosts]) as [RestartCause, number][];
	const limits = canLimitMemory();
	const bits = canTurnBits();
	const possible = entries.filter(([cause]) => (cause !== "memory" || limits) && (cause !== "wrong result" || bits));
	const deck = possible.flatMap(([cause, share]) => Array<RestartCause>(share).fill(cause));
	return Array.from({ length: count }, () => deck[Math.floor(random() * deck.length)]!);
}

if (import.meta.main) {
	const values = attackFlags({ count: "200", seed: "1", each: "20", hosts: "1", ranks: "4" });
	const random = numbers(Number(values.seed));
	const hosts = Number(values.hosts);
	const all: Recovery[] = [];
	let wrong = 0;
	const drawnFrom = layouts.filter(({ ranks }) => ranks === Number(values.ranks));
	for (let run = 0; all.length < Number(values.count); run++) {
		const layout = drawnFrom[run % drawnFrom.length]!;
		const number = Math.min(Number(values.each), Number(values.count) - all.length);
		const drawn = drawCauses(number, random, hosts > 1 ? "three" : "one");
		const smallDisk = run % 2 === 1 || values.only === "disk";
		const faults = drawn.map((cause) => {
			const one = (values.only as RestartCause | undefined) ?? cause;
			return one === "error" && smallDisk ? "disk" : one;
		});
		const bits = faults.flatMap((cause, index) => (cause === "wrong result" ? [index] : []));
		if (hosts > 1) for (const index of bits.slice(mostWrongResults)) faults[index] = "kill";
		// The first host is lost once.
		if (hosts > 1 && values.only === undefined) faults[faults.length - 1] = "first host";
		const spares = hosts > 1 ? 1 : run % 2;
		const { recoveries, problems } = await meetRestarts(layout, faults, {
			seed: Number(values.seed) + run,
			spares,
			hosts,
			smallDisk,
		});
		all.push(...recoveries);
		wrong += problems.length > 0 ? 1 : 0;
		console.log(
			`${problems.length === 0 ? "ok" : "WRONG"} ${layout.name}: ${recoveries.map(({ cause, seconds, lost }) => `${cause} ${seconds.toFixed(2)}${lost > 0 ? ` (lost ${lost})` : ""}`).join(", ")}`,
		);
		for (const problem of problems) console.log(`  ${problem}`);
	}
	const lost = (some: readonly Recovery[]) => some.reduce((sum, one) => sum + one.lost, 0);
	console.log(`\n${tableOf(all, ({ cause }) => cause, { "steps lost": lost })}\n${wrong} runs went wrong`);
	process.exit(wrong === 0 ? 0 : 1);
}
