/**
 * What watching a run costs: the same training of two ranks without any record, with everything on (JSON log, TensorBoard,
 * flight recorder), and traced, in turns; steps are timed from line to line, so that what is written between them counts.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { executable } from "../commands/mimo.ts";
import { type Row, row } from "./measure.ts";

const steps = 60;
/** The slowest of a run's steps met something else. */
const leftOut = 0.1;
const run = `--preset nemotron-vlm-tiny --llm-offset 1 --train-iters ${steps} --lr-warmup-iters 0 --log-interval 1 --device cpu --threads 1`;

const variants = {
	off: "",
	on: "--log-json log.jsonl --tensorboard-dir events --log-timers-to-tensorboard --flight-recorder-dir recordings",
	trace: `--profile-step-start 1 --profile-step-end ${steps}`,
} as const;
type Variant = keyof typeof variants;

/** Mean seconds of a step in a new folder below `parent`. */
function secondsOfStep(variant: Variant, parent: string): number {
	const folder = mkdtempSync(join(parent, `${variant}-`));
	const flags = `${run} ${variants[variant]}`.trim().split(" ");
	const child = Bun.spawnSync([executable, "train", ...flags], { cwd: folder, stdout: "pipe", stderr: "pipe" });
	if (!child.success) throw new Error(`mimo train ${flags.join(" ")}: ${child.stderr}`);
	const times = [...child.stdout.toString().matchAll(/^ \[([^\]]+)\] iteration/gm)].map(([, at]) => Date.parse(at!));
	if (times.length !== steps) throw new Error(`${times.length} of ${steps} steps have a line.`);
	// The first steps warm up; after the last one a trace is put together.
	const between = times.slice(3, -1).map((at, i) => (at - times[i + 2]!) / 1000);
	const kept = between.toSorted((a, b) => a - b).slice(0, Math.ceil(between.length * (1 - leftOut)));
	return kept.reduce((sum, one) => sum + one, 0) / kept.length;
}

export function benchOverhead(rounds = 5): Row[] {
	const parent = mkdtempSync(join(tmpdir(), "mimo-bench-overhead-"));
	try {
		const names = Object.keys(variants) as Variant[];
		const all = Array.from(
			{ length: rounds },
			(_, round) =>
				Object.fromEntries(
					// Every round begins with another one.
					names.map((_, i) => names[(i + round) % names.length]!).map((name) => [name, secondsOfStep(name, parent)]),
				) as Record<Variant, number>,
		);
		// What disturbs a machine only adds.
		const least = (variant: Variant) => Math.min(...all.map((one) => one[variant]));
		return (
			[
				["on", "JSON log, TensorBoard, flight recorder", 0.99],
				["trace", "trace", 0.95],
			] as const
		).map(([variant, operation, target]) => {
			const what = { group: "what watching a step costs", operation, shape: "2 ranks", threads: 1 };
			return row({ ...what, baseline: "nothing on", target }, [least(variant), least("off")]);
		});
	} finally {
		rmSync(parent, { recursive: true });
	}
}
