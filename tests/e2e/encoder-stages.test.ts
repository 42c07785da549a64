/** An encoder in pipeline stages: what it trains and saves, every other layout goes on with. */
import { afterAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { Scratch } from "../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const small =
	"--preset nemotron-vlm-tiny --hidden-size 32 --kv-channels 8 --mamba-num-heads 4 --mamba-head-dim 16 --vision-num-layers 4 " +
	"--vision-hidden-size 32 --micro-batch-size 2 --global-batch-size 8 --lr-warmup-iters 0 --lr-decay-iters 9 --adam-eps 1e-6 " +
	`--encoder-balance number --log-interval 1 --threads 1 ${deviceFlags}`;

/** Trains up to step `last`; losses and gradient norms of its steps. */
function train(log: string, flags: string, last: number): (readonly [loss: number, norm: number])[] {
	const words = [...small.split(" "), ...flags.split(" "), "--train-iters", String(last), "--log-json", log];
	const { exitCode, stderr } = mimo(["train", ...words], scratch.path);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const lines = readFileSync(join(scratch.path, log), "utf8").trim().split("\n");
	return lines.flatMap((line) => {
		const { "lm loss": loss, grad_norm: norm } = JSON.parse(line) as Record<string, number>;
		return loss === undefined || norm === undefined ? [] : [[loss, norm] as const];
	});
}

function expectClose(steps: readonly (readonly number[])[], wanted: readonly (readonly number[])[]): void {
	expect(steps).toHaveLength(wanted.length);
	for (const [step, values] of steps.entries()) {
		for (const [which, value] of values.entries()) {
			expect(Math.abs(value / wanted[step]![which]! - 1)).toBeLessThan(5e-6);
		}
	}
}

test("two stages save, one goes on, and four do", () => {
	const whole = train("whole", "--encoder-pp 1", 4);
	const begun = train(
		"two",
		"--encoder-pp 2 --encoder-dp 2 --use-distributed-optimizer --save stages --save-interval 2",
		2,
	);
	expectClose(begun, whole.slice(0, 2));
	for (const stages of [1, 4]) {
		expectClose(train(`from-${stages}`, `--encoder-pp ${stages} --load stages`, 4), whole.slice(2));
	}
}, 60_000);

test("a frozen tower: its first stages have no gradients, and the projector trains", () => {
	const frozen = "--freeze-vit --eval-iters 1 --eval-interval 2";
	expectClose(train("frozen-2", `--encoder-pp 2 ${frozen}`, 2), train("frozen-1", `--encoder-pp 1 ${frozen}`, 2));
}, 60_000);
