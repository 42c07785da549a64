/**
 * The cost of watching a run: the same training of two ranks without any record, with everything on (JSON log,
 * TensorBoard, flight recorder), and traced, in turns. Steps are timed from line to line, so that what is written
 * between them counts. Step by step the least time of all rounds counts: the work of a step is the same in each, and
 * what disturbs a machine only adds. A second run without any record says how far two equal ones are apart.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { executable } from "../commands/mimo.ts";
import { type Row, row } from "./measure.ts";

const steps = 40;
/** First steps, which are not measured: they take memory, and code is compiled. */
const leftOut = 5;
const run = `--preset nemotron-vlm-tiny --llm-offset 1 --train-iters ${steps} --lr-warmup-iters 0 --log-interval 1 --device cpu --threads 1`;

const variants = {
	off: "",
	on: "--log-json log.jsonl --tensorboard-dir events --log-timers-to-tensorboard --flight-recorder-dir recordings",
	again: "",
	trace: `--profile-step-start 1 --profile-step-end ${steps}`,
} as const;
type Variant = keyof typeof variants;

/** Seconds of every step in a new folder below `parent`. */
async function secondsOfSteps(variant: Variant, parent: string): Promise<number[]> {
	const folder = mkdtempSync(join(parent, `${variant}-`));
	const flags = `${run} ${variants[variant]}`.trim().split(" ");
	const child = Bun.spawn([executable, "train", ...flags], { cwd: folder, stdout: "pipe", stderr: "pipe" });
	const times: number[] = [];
	// A line has its time in milliseconds; here it comes within microseconds.
	for await (const chunk of child.stdout.pipeThrough(new TextDecoderStream())) {
		const now = performance.now();
		for (const _ of chunk.matchAll(/\] iteration/g)) times.push(now);
	}
	if ((await child.exited) !== 0) throw new Error(`mimo train ${flags.join(" ")}: ${await child.stderr.text()}`);
	if (times.length !== steps) throw new Error(`${times.length} of ${steps} steps have a line.`);
	// After the last one a trace is put together.
	return times.slice(leftOut, -1).map((at, i) => (at - times[i + leftOut - 1]!) / 1000);
}

export async function benchOverhead(rounds = 7): Promise<Row[]> {
	const parent = mkdtempSync(join(tmpdir(), "mimo-bench-overhead-"));
	try {
		const names = Object.keys(variants) as Variant[];
		const least = {} as Record<Variant, number[]>;
		for (let round = 0; round < rounds; round++) {
			for (const i of names.keys()) {
				// Every round begins with another one.
				const name = names[(i + round) % names.length]!;
				const seconds = await secondsOfSteps(name, parent);
				least[name] = seconds.map((one, step) => Math.min(one, least[name]?.[step] ?? one));
			}
		}
		const mean = (variant: Variant) => least[variant].reduce((sum, one) => sum + one, 0) / least[variant].length;
		const noise = (Math.abs(mean("again") / mean("off") - 1) * 100).toFixed(1);
		console.log(`overhead: two runs with nothing on are ${noise} % apart`);
		const off = (mean("off") + mean("again")) / 2;
		return (
			[
				["on", "JSON log, TensorBoard, flight recorder", 0.99],
				["trace", "trace", 0.95],
			] as const
		).map(([variant, operation, target]) => {
			const what = { group: "what watching a step costs", operation, shape: "2 ranks", threads: 1 };
			return row({ ...what, baseline: "nothing on", target }, [mean(variant), off]);
		});
	} finally {
		rmSync(parent, { recursive: true });
	}
}
