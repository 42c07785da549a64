/**
 * The fine-tuning example (docs/fine-tune.md) on GPUs under many options: losses of sixty steps beside the CPU library's, those
 * with CUDA graphs beside those without, and a run that is killed and goes on. A line a run; the exit code is 1 when one differs.
 *
 *   bun tests/cuda/fine-tune.ts MIMO [PART OF A NAME ...]     MIMO: the executable
 *
 * Ranks share the GPU where there is one.
 */
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [mimo, ...parts] = process.argv.slice(2);
if (mimo === undefined) throw new Error("fine-tune.ts needs the path of an executable.");
const work = mkdtempSync(join(tmpdir(), "mimo-fine-tune-"));
const gpus = Bun.spawnSync(["nvidia-smi", "--list-gpus"]).stdout.toString().trim().split("\n").length;
/** Runs that are under way at once. */
const atOnce = 4;
const steps = 60;

interface Run {
	readonly name: string;
	readonly flags: string;
	/** Name of the run with the same losses, and by how much of one a loss may differ. */
	readonly like: string;
	readonly limit: number;
}

const cuda = gpus > 1 ? "--device cuda" : "--device cuda --distributed-backend shm";
/** The language model has the encoder's ranks. */
const colocated = "--llm-offset 0";
/** Each module has one rank. */
const single = "--encoder-dp 1 --llm-dp 1 --llm-ep 1";
/** How far a loss may be from the CPU library's: fp32 adds in another order on a GPU. */
const limits = { fp32: 1e-5, bf16: 2e-2 };

function runsOf(dtype: "fp32" | "bf16"): Run[] {
	const run = (name: string, like: string, flags: string): Run => ({
		name: `${dtype} ${name}`,
		flags: `${cuda} ${flags}${dtype === "bf16" ? " --bf16" : ""}`,
		like,
		limit: limits[dtype],
	});
	/** The run, deterministic, and the same with CUDA graphs. */
	const withGraphs = (name: string, like: string, flags: string): Run[] => {
		const plain = run(name, like, `${flags} --deterministic-mode`);
		const graphs = { name: `${plain.name}, graphs`, flags: `${plain.flags} --cuda-graph-impl local` };
		return [plain, { ...graphs, like: plain.name, limit: 0 }];
	};
	const shared = "cpu colocated";
	return [
		...withGraphs("one", "cpu", `${colocated} ${single}`),
		...withGraphs("1+1", "cpu", single),
		...withGraphs("colocated", shared, colocated),
		...withGraphs("allgather", shared, `${colocated} --moe-token-dispatcher-type allgather`),
		run("timed", shared, `${colocated} --algorithm-choice timed`),
		run("full recomputation", shared, `${colocated} --recompute-granularity full`),
		run(
			"selective recomputation",
			shared,
			`${colocated} --recompute-granularity selective --recompute-modules core_attn layernorm mamba mlp moe`,
		),
		run("turns", shared, `${colocated} --overlap-moe-expert-parallel-comm --delay-wgrad-compute`),
		run(
			"sharded optimizer",
			shared,
			`${colocated} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --encoder-ddp-overlap`,
		),
		run("pp2", "cpu", `${colocated} --encoder-dp 2 --llm-dp 1 --llm-ep 1 --llm-pp 2`),
		run("tp2", "cpu", `${colocated} --encoder-dp 1 --encoder-tp 2 --llm-dp 1 --llm-tp 2`),
	];
}

const cpu = { like: "", limit: 0 };
const all: readonly Run[] = [
	{ name: "cpu", flags: `--device cpu ${colocated} ${single}`, ...cpu },
	{ name: "cpu colocated", flags: `--device cpu ${colocated}`, ...cpu },
	...runsOf("fp32"),
	...runsOf("bf16"),
];

const common = [
	...["--config", "examples/shapes/train.yaml", "--load-hf", "examples/shapes/language"],
	...["--load-vision", "examples/shapes/tower", "--data-path", join(work, "set"), "--train-iters", `${steps}`],
	...["--log-interval", "1", "--eval-interval", "1000", "--num-workers", "1"],
];

/** Losses of a JSON log by step; a resumed log has its later steps once. */
function lossesOf(log: string): number[] {
	const losses: number[] = [];
	for (const line of readFileSync(log, "utf8").trim().split("\n")) {
		const step = JSON.parse(line) as { iteration?: number; "lm loss"?: number };
		if (step["lm loss"] !== undefined && step.iteration !== undefined) losses[step.iteration - 1] = step["lm loss"];
	}
	return losses;
}

function start(name: string, flags: string) {
	const log = join(work, `${name}.jsonl`);
	const child = Bun.spawn([mimo!, "train", ...common, ...flags.split(" "), "--log-json", log], {
		env: { ...process.env, BUN_BE_BUN: undefined },
		stdin: "ignore",
		stdout: "ignore",
		stderr: "pipe",
		detached: true,
	});
	return { child, log };
}

let failed = 0;
function report(name: string, good: boolean, text: string) {
	failed += Number(!good);
	console.log(`${good ? "ok    " : "FAILED"} ${name}: ${text}`);
}

const losses = new Map<string, number[]>();
/** Runs and keeps the losses; a run that does not end well has none. */
async function train(run: Run): Promise<void> {
	const { child, log } = start(run.name, run.flags);
	const limit = setTimeout(() => process.kill(-child.pid, "SIGKILL"), 180_000);
	const message = await child.stderr.text();
	const code = await child.exited;
	clearTimeout(limit);
	if (code === 0) losses.set(run.name, lossesOf(log));
	else report(run.name, false, `exit code ${child.signalCode ?? code}, ${message.trim().slice(-400)}`);
}

function judge({ name, like, limit }: Run): void {
	const [is, was] = [losses.get(name), losses.get(like)];
	if (is === undefined || (like !== "" && was === undefined)) return;
	const apart = is.map((loss, step) => (was === undefined ? 0 : Math.abs(loss / was[step]! - 1)));
	const good = is.length === steps && apart.every((one) => one <= limit);
	const beside = like === "" ? "" : `, at most ${Math.max(...apart).toExponential(1)} from ${like} (limit ${limit})`;
	report(name, good, `${is.length} steps, loss ${is[0]?.toFixed(6)} to ${is.at(-1)?.toFixed(5)}${beside}`);
}

/** A deterministic run that is killed in its step 45 and goes on has the losses and the weights of a whole one. */
async function killed(): Promise<void> {
	const flags = `${cuda} ${colocated} --deterministic-mode --save-interval 20 --save`;
	const whole = start("whole", `${flags} ${join(work, "whole")}`);
	if ((await whole.child.exited) !== 0) return report("killed", false, "the whole run failed");
	const first = start("killed", `${flags} ${join(work, "part")}`);
	while (
		first.child.exitCode === null &&
		!(
			await Bun.file(first.log)
				.text()
				.catch(() => "")
		).includes('"iteration":45')
	) {
		await Bun.sleep(10);
	}
	process.kill(-first.child.pid, "SIGKILL");
	await first.child.exited;
	const resumed = start("resumed", `${flags} ${join(work, "part")} --load ${join(work, "part")}`);
	if ((await resumed.child.exited) !== 0) return report("killed", false, await resumed.child.stderr.text());
	const weights = (folder: string) =>
		[...new Bun.Glob(`iter_*${steps}/**/*.safetensors`).scanSync(join(work, folder))]
			.sort()
			.map((file) => `${file} ${Bun.hash(readFileSync(join(work, folder, file)))}`);
	const [is, was] = [weights("part"), weights("whole")];
	const equal = was.length > 0 && is.join() === was.join();
	report("killed", equal, `${was.length} files of the last checkpoint ${equal ? "equal" : "differ"}`);
}

try {
	Bun.spawnSync(["tar", "-xzf", "examples/shapes/pictures.tar.gz", "-C", work]);
	const set = [
		mimo,
		"data",
		"import",
		join(work, "pictures"),
		"--output",
		join(work, "set"),
		"--split-ratio",
		"90,10,0",
	];
	const imported = Bun.spawnSync(set, { env: { ...process.env, BUN_BE_BUN: undefined } });
	if (!imported.success) throw new Error(imported.stderr.toString());
	const isWanted = ({ name }: Run) => parts.length === 0 || parts.some((part) => name.includes(part));
	const wanted = all.filter((run) => isWanted(run) || all.some((other) => isWanted(other) && other.like === run.name));
	const queue = [...wanted];
	const lanes = Array.from({ length: atOnce }, async () => {
		for (let run = queue.shift(); run !== undefined; run = queue.shift()) await train(run);
	});
	await Promise.all(lanes);
	for (const run of wanted) judge(run);
	if (parts.length === 0 || parts.includes("killed")) await killed();
} finally {
	rmSync(work, { recursive: true, force: true });
}
console.log(`${all.length + 1} runs, ${failed} failed`);
process.exit(failed === 0 ? 0 : 1);
