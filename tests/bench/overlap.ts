/** Encoder and language model on a rank each: the step of eight microbatches against the larger side's own work. */
import { availableParallelism } from "node:os";
import { runRanks } from "../parallel/ranks.ts";
import { type Row, row } from "./measure.ts";

export async function benchOverlap(): Promise<Row[]> {
	const outcomes = await runRanks("../bench/overlap-rank.ts", 2);
	const failed = outcomes.find(({ exitCode }) => exitCode !== 0);
	if (failed) throw new Error(`overlap-rank.ts failed:\n${failed.stderr}`);
	const { alone, step } = JSON.parse(outcomes[0]!.stdout) as Record<"alone" | "step", [number, number]>;
	const [encoder, language] = alone.map((seconds) => (seconds * 1000).toFixed(0));
	const cores = availableParallelism();
	const about = {
		group: `encoder and language model on a rank each, 8 microbatches, ${cores} cores`,
		operation: "training step",
		shape: `encoder alone ${encoder} ms, language model ${language} ms`,
		threads: 1,
		baseline: "larger side alone",
		// Two sides cannot work at once on one core.
		target: cores > 1 ? 1 / 1.2 : null,
	};
	return [row(about, [Math.max(...step), Math.max(...alone)])];
}
