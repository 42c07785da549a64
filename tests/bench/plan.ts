/**
 * The forecast of `mimo plan` against the run itself, given the experts' imbalance that the run's log shows: the step's time
 * after --measure has timed this machine, and the peak memory of every module's largest rank. Run and plan take turns, until
 * the least time of each has settled: disturbances only add time, and a slow minute meets both. Medians over the turns
 * are printed beside the least times.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { median } from "../../src/observe/series.ts";
import { executable } from "../commands/mimo.ts";
import { loggedSteps } from "../e2e/small-run.ts";
import type { Row } from "./measure.ts";

/** How close a plan is meant to come: 1 less the largest relative error. */
const targets = { time: 0.9, memory: 0.95 };
/** Steps of a run; of a timed one's first ones, whose code is still being compiled, the time is not looked at. */
const steps = { timed: 50, first: 20, other: 14 };
/** Of plan and run; those in which neither least has fallen by `fall`, by which time both have met the machine at rest. */
const rounds = { fewest: 3, most: 8, settled: 2, fall: 0.01 };
const text = `--preset nemotron-tiny --data-path ${join(import.meta.dir, "../../examples/text/king-james.txt")}`;
const images = "--preset nemotron-vlm-tiny";
/** The preset's five layers for two stages. */
const stages = "--hybrid-layer-pattern ME*|-ME";
const common = `--lr-warmup-iters 0 --device cpu --threads 1`;

interface Layout {
	readonly name: string;
	readonly flags: string;
	/** Of more than a rank or so beyond the cores the time is not compared: whose turn it is decides then. */
	readonly timed: boolean;
}

const layouts: readonly Layout[] = [
	{ name: "one rank", flags: text, timed: true },
	{ name: "dp2 ep2, ZeRO-1", flags: `${text} --llm-dp 2 --llm-ep 2 --use-distributed-optimizer`, timed: true },
	{ name: "both modules in one process", flags: `${images} --llm-offset 0`, timed: true },
	{ name: "encoder 1 + language 1", flags: `${images} --llm-offset 1`, timed: true },
	{ name: "encoder 1 + language pp2", flags: `${images} --llm-offset 1 --llm-pp 2 ${stages}`, timed: true },
	{
		name: "colocated dp2 | dp2 ep2",
		flags: `${images} --encoder-dp 2 --llm-offset 0 --llm-dp 2 --llm-ep 2`,
		timed: true,
	},
	{
		name: "colocated dp2 | pp2",
		flags: `${images} --encoder-dp 2 --llm-offset 0 --llm-pp 2 ${stages}`,
		timed: true,
	},
	{ name: "tp2", flags: `${text} --llm-tp 2`, timed: false },
	{ name: "tp2 dp2 ep4", flags: `${text} --llm-tp 2 --llm-dp 2 --llm-ep 4`, timed: false },
	{
		name: "encoder tp2 + tp2 dp2 ep4",
		flags: `${images} --encoder-tp 2 --llm-tp 2 --llm-dp 2 --llm-ep 4`,
		timed: false,
	},
];

interface Plan {
	readonly step: { readonly seconds: number };
	readonly modules: readonly {
		readonly module: string;
		readonly firstRank: number;
		readonly ranks: number;
		readonly memory: { readonly peak: number };
	}[];
}

interface Step {
	readonly elapsed_ms: number;
	readonly memory: readonly { readonly peak: number }[];
}

function mimo(command: string, args: string): string {
	const child = Bun.spawnSync([executable, command, ...`${args} ${common}`.split(" ")], { stderr: "pipe" });
	if (!child.success) throw new Error(`mimo ${command} ${args}: ${child.stderr}`);
	return child.stdout.toString();
}

export function benchPlan(): Row[] {
	const folder = mkdtempSync(join(tmpdir(), "mimo-bench-plan-"));
	try {
		return layouts.flatMap((layout) => benchLayout(layout, join(folder, layout.name.replaceAll(/\W+/g, "-"))));
	} finally {
		rmSync(folder, { recursive: true });
	}
}

function benchLayout({ name, flags: layoutFlags, timed }: Layout, path: string): Row[] {
	const flags = `${layoutFlags} --train-iters ${timed ? steps.timed : steps.other}`;
	let [planned, measured] = [Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY];
	const turns: { readonly least: number; readonly median: number; readonly plan: number }[] = [];
	let log = "";
	let fell = 0;
	const over = (round: number) =>
		timed ? round >= rounds.fewest && (round >= rounds.most || round - fell >= rounds.settled) : round === 1;
	for (let round = 0; !over(round); ) {
		round++;
		log = `${path}-${round}.jsonl`;
		mimo("train", `${flags} --log-json ${log}`);
		if (!timed) continue;
		const elapsed = (loggedSteps(log) as unknown as Step[]).slice(steps.first).map((one) => one.elapsed_ms / 1000);
		const plan = JSON.parse(mimo("plan", `${flags} --measure --expert-imbalance ${log} --json`)) as Plan;
		const least = Math.min(...elapsed);
		if (least < measured * (1 - rounds.fall) || plan.step.seconds < planned * (1 - rounds.fall)) fell = round;
		measured = Math.min(measured, least);
		planned = Math.min(planned, plan.step.seconds);
		turns.push({ least, median: median(elapsed), plan: plan.step.seconds });
	}
	if (timed) {
		const shown = (of: "least" | "median" | "plan") => (median(turns.map((one) => one[of])) * 1000).toFixed(1);
		console.log(
			`  ${name}: medians of ${turns.length} turns: a run's least step ${shown("least")} ms, its median step ${shown("median")} ms, plan ${shown("plan")} ms`,
		);
	}
	const rows = timed ? [comparison("seconds of a step", name, planned, measured, 1000, "ms")] : [];
	const plan = JSON.parse(mimo("plan", `${flags} --expert-imbalance ${log} --json`)) as Plan;
	const { memory } = loggedSteps(log).at(-1) as unknown as Step;
	const peaks = plan.modules.map(({ module, firstRank, ranks, memory: { peak } }) => {
		const largest = Math.max(...memory.slice(firstRank, firstRank + ranks).map((one) => one.peak));
		return comparison("peak memory", `${name}: ${module}`, peak, largest, 2 ** -20, "MiB");
	});
	return [...rows, ...peaks];
}

/** Prints what was said and what was, and makes a row of how close they are. */
function comparison(
	group: "seconds of a step" | "peak memory",
	operation: string,
	planned: number,
	measured: number,
	scale: number,
	unit: string,
): Row {
	const shown = (value: number) => `${(value * scale).toFixed(1)} ${unit}`;
	console.log(
		`  ${operation}, ${group}: planned ${shown(planned)}, measured ${shown(measured)}, ratio ${(planned / measured).toFixed(3)}`,
	);
	return {
		group: `plan against run, ${group} (${unit}; ratio: 1 less the relative error)`,
		operation,
		shape: "",
		threads: 1,
		milliseconds: planned * scale,
		baseline: "run",
		baselineMilliseconds: measured * scale,
		ratio: 1 - Math.abs(planned / measured - 1),
		target: group === "peak memory" ? targets.memory : targets.time,
	};
}
