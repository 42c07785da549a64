/** Whole trainings of this process: what `mimo train` does between its configuration and its end. */
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { readModelKeys } from "../../../src/checkpoint/hf/model-keys.ts";
import { resolveConfiguration } from "../../../src/config/resolve.ts";
import type { Device } from "../../../src/native/device.ts";
import { World } from "../../../src/parallel/world.ts";
import { requireStart } from "../../../src/train/restart/before-training.ts";
import { runTraining } from "../../../src/train/run.ts";

/** A model that may have every kind of layer. */
export const tinyFlags =
	"--preset nemotron-tiny --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --kv-channels 8 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8 --mamba-chunk-size 16 --ffn-hidden-size 48 --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24 --seq-length 24 --micro-batch-size 1 --global-batch-size 2 --lr 2e-3 --lr-warmup-iters 0 --lr-decay-iters 40 --log-interval 1";

/** Trains on a text beside the log and returns the log's losses and gradient norms by step. */
export async function trained(device: Device, flags: string, log: string): Promise<Record<number, object>> {
	rmSync(log, { force: true });
	const text = join(dirname(log), "text.txt");
	writeFileSync(text, "in the beginning was the word ".repeat(50));
	const interval = flags.includes("--save ") ? "--save-interval 100 " : "";
	const args = `${tinyFlags} ${interval}--data-path ${text} --split 100,0,0 ${flags} --log-json ${log}`.split(" ");
	const { configuration } = resolveConfiguration(args, {}, { folders: readModelKeys });
	await requireStart(configuration);
	const exitCode = await runTraining(configuration, World.alone(device));
	if (exitCode !== 0) throw new Error(`The training ended with ${exitCode}.`);
	const lines = readFileSync(log, "utf8").trim().split("\n");
	return Object.fromEntries(
		lines
			.map((line) => JSON.parse(line))
			.filter((line) => "lm loss" in line)
			.map((line) => [
				line.iteration,
				Object.fromEntries(Object.entries(line).filter(([key]) => / loss$|grad_norm|learning_rate/.test(key))),
			]),
	);
}
