/** Trainings of a tiny vision-language model on many layouts in one folder: their checkpoints and logs. */
import { expect } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { deviceFlags, mimo, type Outcome } from "../commands/mimo.ts";

const model =
	"--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 32 --micro-batch-size 2 --global-batch-size 8";
const recipe = `--lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 0 --lr-decay-iters 40 --adam-eps 1e-6 --log-interval 1 ${deviceFlags}`;
const layouts = {
	colocated: "--llm-offset 0",
	"1+1": "--llm-offset 1",
	"dp2+dp2ep2, ZeRO-1": "--encoder-dp 2 --llm-dp 2 --llm-ep 2 --use-distributed-optimizer",
	"tp2+tp2ep2": "--encoder-tp 2 --llm-tp 2 --llm-ep 2",
	"1+dp4ep2": "--llm-dp 4 --llm-ep 2 --micro-batch-size 1",
	"1+tp4ep4": "--llm-tp 4 --llm-ep 4",
	"tp2dp2+tp2, ZeRO-1": "--encoder-tp 2 --encoder-dp 2 --llm-tp 2 --use-distributed-optimizer",
} as const;
export type LayoutName = keyof typeof layouts;

/** Layout of the uninterrupted run: disjoint grids. */
export const reference: LayoutName = "dp2+dp2ep2, ZeRO-1";

export class CheckpointRuns implements Disposable {
	readonly folder = mkdtempSync(join(tmpdir(), "mimo-checkpoints-"));

	path(name: string): string {
		return join(this.folder, name);
	}

	/** Arguments of `mimo` that train on a layout. */
	flags(layout: LayoutName, more: string): string[] {
		return ["train", ...`${model} ${recipe} ${layouts[layout]} ${more}`.split(" ")];
	}

	train(layout: LayoutName, more: string): Outcome {
		return mimo(this.flags(layout, more), this.folder);
	}

	/** Trains, and expects exit code 0 without a word on stderr; returns stdout. */
	trainWell(layout: LayoutName, more: string): string {
		const { exitCode, stdout, stderr } = this.train(layout, more);
		expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
		return stdout;
	}

	/** Trains four steps without interruption, with checkpoints of steps 2 and 4 in "whole". */
	trainWhole(): void {
		const save = "--save whole --save-interval 2 --async-save --log-json whole.jsonl";
		this.trainWell(reference, `--train-iters 4 ${save} --eval-iters 1 --eval-interval 2`);
	}

	/** A log's values of every step (and of evaluations, under -step), without times; a step that was repeated must repeat its values. */
	steps(log: string): Map<number, string> {
		const found = new Map<number, string>();
		for (const line of readFileSync(this.path(log), "utf8").trim().split("\n")) {
			if (line === "") continue;
			const { iteration, consumed_samples: consumed, learning_rate: rate, grad_norm: norm, ...rest } = JSON.parse(line);
			if (rest.split !== undefined) {
				found.set(-iteration, JSON.stringify(rest["lm loss"]));
				continue;
			}
			if (consumed === undefined) continue;
			const values = JSON.stringify([consumed, rate, norm, rest["lm loss"], rest.seq_load_balancing_loss, rest.tokens]);
			expect([iteration, found.get(iteration) ?? values]).toEqual([iteration, values]);
			found.set(iteration, values);
		}
		return found;
	}

	/** SHA-256 of every tensor of a checkpoint, the optimizer's included. */
	digests(root: string): Record<string, string> {
		using checkpoint = NativeCheckpoint.open(this.path(root));
		return Object.fromEntries(
			[...checkpoint.tensors.keys()].map((name) => [
				name,
				new Bun.CryptoHasher("sha256").update(readTensor(checkpoint, name) as Float32Array).digest("hex"),
			]),
		);
	}

	[Symbol.dispose](): void {
		rmSync(this.folder, { recursive: true });
	}
}
