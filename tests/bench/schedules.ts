/**
 * How long stages of a pipeline wait for each other: 1F1B and interleaved 1F1B of two stages whose passes take equally long,
 * as real runs of the CPU library, a stage a core. Beside them the formulas, (p − 1) / m and (p − 1) / (m v) of the
 * time in which a stage works, and what `mimo plan --measure` says. Shapes take turns; medians of turns.
 */
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { median } from "../../src/observe/series.ts";
import { executable } from "../commands/mimo.ts";
import { loggedSteps } from "../e2e/small-run.ts";
import type { Row } from "./measure.ts";

const stages = 2;
const turns = 3;
/** Of a run; the code of the first ones is still being compiled. */
const steps = { all: 60, first: 20 };
/** 1 less the difference of the step's length. */
const target = 0.95;

interface Shape {
	readonly virtualStages: number;
	readonly microbatches: number;
}

const shapes: readonly Shape[] = [1, 2].flatMap((virtualStages) =>
	[4, 8].map((microbatches) => ({ virtualStages, microbatches })),
);

/** Four equal layers; embedding and head are small beside them. */
function flagsOf({ virtualStages, microbatches }: Shape): string[] {
	const segments = stages * virtualStages;
	const pattern = Array.from({ length: segments }, () => "M".repeat(4 / segments)).join("|");
	const data = `--data-path ${join(import.meta.dir, "../../examples/text/king-james.txt")}`;
	const model = `--preset nemotron-tiny --hidden-size 128 --seq-length 256 --hybrid-layer-pattern ${pattern} ${data}`;
	const batch = `--micro-batch-size 2 --global-batch-size ${2 * microbatches} --llm-pp ${stages}`;
	const run = `--train-iters ${steps.all} --lr-warmup-iters 0 --log-interval 1 --device cpu --threads 1`;
	return `${model} ${batch} ${run}`.split(" ");
}

interface LoggedStep {
	readonly elapsed_ms: number;
	readonly modules: readonly { readonly compute_ms: number; readonly bridge_ms: number; readonly wait_ms: number }[];
}

interface PlannedModule {
	readonly forward: number;
	readonly backward: number;
	readonly wait: number;
}

function mimo(command: string, args: readonly string[]): string {
	const child = Bun.spawnSync([executable, command, ...args], { stderr: "pipe" });
	if (!child.success) throw new Error(`mimo ${command} ${args.join(" ")}: ${child.stderr}`);
	return child.stdout.toString();
}

/** Waiting over working, in the fastest quarter of the steps: what else the machine does makes stages wait too. */
function measured(shape: Shape, log: string): number {
	mimo("train", [...flagsOf(shape), "--log-json", log]);
	const timed = (loggedSteps(log) as unknown as LoggedStep[]).slice(steps.first);
	const fastest = timed.toSorted((a, b) => a.elapsed_ms - b.elapsed_ms).slice(0, Math.ceil(timed.length / 4));
	return median(fastest.map(({ modules: [one] }) => (one!.bridge_ms + one!.wait_ms) / one!.compute_ms));
}

/** Waiting over working by a plan, a mean over stages; all shapes have the same operations, which the first of a turn measures. */
function planned(shape: Shape, rates: string): number {
	const measure = existsSync(rates) ? [] : ["--measure"];
	const plan = JSON.parse(mimo("plan", [...flagsOf(shape), ...measure, "--rates", rates, "--json"])) as {
		readonly step: { readonly modules: readonly PlannedModule[] };
	};
	const shares = plan.step.modules.map(({ forward, backward, wait }) => {
		return wait / (shape.microbatches * (forward + backward));
	});
	return shares.reduce((sum, share) => sum + share, 0) / shares.length;
}

export function benchSchedules(): Row[] {
	const folder = mkdtempSync(join(tmpdir(), "mimo-bench-schedules-"));
	try {
		const found = shapes.map((shape) => ({ shape, runs: [] as number[], plans: [] as number[] }));
		for (let turn = 0; turn < turns; turn++) {
			for (const [index, { shape, runs, plans }] of found.entries()) {
				runs.push(measured(shape, join(folder, `${turn}-${index}.jsonl`)));
				plans.push(planned(shape, join(folder, `${turn}-rates.json`)));
			}
		}
		return found.flatMap(({ shape, runs, plans }) => rowsOf(shape, median(runs), median(plans)));
	} finally {
		rmSync(folder, { recursive: true });
	}
}

function rowsOf({ virtualStages, microbatches }: Shape, run: number, plan: number): Row[] {
	const formula = (stages - 1) / (microbatches * virtualStages);
	const name = virtualStages === 1 ? "1F1B" : `interleaved 1F1B, ${virtualStages} segments a stage`;
	return (
		[
			["formula", formula],
			["plan", plan],
		] as const
	).map(([baseline, share]) => ({
		group: "waiting of a stage over its work, two stages of equal passes (%; ratio: of the step's lengths)",
		operation: name,
		shape: `${microbatches} microbatches`,
		threads: 1,
		milliseconds: 100 * run,
		baseline,
		baselineMilliseconds: 100 * share,
		ratio: Math.min((1 + run) / (1 + share), (1 + share) / (1 + run)),
		target,
	}));
}
