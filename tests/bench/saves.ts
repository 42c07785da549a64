/**
 * How long training stands still for a checkpoint with --async-save, against a hundredth of the time between two checkpoints:
 * two ranks with the distributed optimizer, a checkpoint every 25 steps, which is some seconds.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { median } from "../../src/observe/series.ts";
import { executable } from "../commands/mimo.ts";
import { type Row, row } from "./measure.ts";

const interval = 25;
const count = 5;
/** Of the time between two checkpoints. */
const allowed = 0.01;
const book = join(import.meta.dir, "../../examples/text/king-james.txt");
const run = `--preset nemotron-tiny --data-path ${book} --hidden-size 384 --llm-dp 2 --llm-ep 2 --use-distributed-optimizer --train-iters ${interval * count} --lr-warmup-iters 0 --log-interval ${interval} --device cpu --threads 1 --save checkpoints --save-interval ${interval} --async-save --keep 1`;

export function benchSaves(): Row[] {
	const folder = mkdtempSync(join(tmpdir(), "mimo-bench-saves-"));
	try {
		const child = Bun.spawnSync([executable, "train", ...run.split(" ")], {
			cwd: folder,
			stdout: "pipe",
			stderr: "pipe",
		});
		if (!child.success) throw new Error(`mimo train ${run}: ${child.stderr}`);
		const output = child.stdout.toString();
		const waits = [...output.matchAll(/^Saved .*training waited ([\d.]+) s\)/gm)].map(([, seconds]) => Number(seconds));
		// Lines stand at the steps of checkpoints; the first is that of step 1.
		const times = [...output.matchAll(/^ \[([^\]]+)\] iteration/gm)].slice(1).map(([, at]) => Date.parse(at!) / 1000);
		if (waits.length !== count || times.length !== count) throw new Error(`Not ${count} checkpoints:\n${output}`);
		const between = (times.at(-1)! - times[0]!) / (count - 1);
		const what = { group: "checkpoints while training goes on", operation: "training stands still", threads: 1 };
		return [
			row({ ...what, shape: `every ${between.toFixed(1)} s`, baseline: `${100 * allowed} % of that`, target: 1 }, [
				median(waits),
				allowed * between,
			]),
		];
	} finally {
		rmSync(folder, { recursive: true });
	}
}
