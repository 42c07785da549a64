/**
 * The argument list of Megatron-LM's examples/mimo/scripts/run_hetero_nemotron_20l_mock_train.sh, sizes reduced and nothing
 * else changed, on its eight ranks; and its log as Megatron's users read it. MIMO_TEST_FULL=1 runs all twenty steps.
 */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { mimo } from "../commands/mimo.ts";

const full = process.env.MIMO_TEST_FULL === "1";

/** Upstream's sizes, made small. */
const sizes: Readonly<Record<string, number>> = {
	"hidden-size": 64,
	"num-attention-heads": 8,
	"num-query-groups": 2,
	"ffn-hidden-size": 48,
	"kv-channels": 8,
	"num-experts": 8,
	"moe-ffn-hidden-size": 48,
	"moe-shared-expert-intermediate-size": 96,
	"mamba-num-heads": 4,
	"mamba-head-dim": 16,
	"mamba-num-groups": 2,
	"mamba-state-dim": 16,
	"seq-length": 128,
	"max-position-embeddings": 128,
	"vocab-size": 1024,
};

function script(values: Readonly<Record<string, number>>): string[] {
	const text = readFileSync(join(import.meta.dir, "upstream-20l.txt"), "utf8").replace(/^#.*/gm, "");
	const words = text.trim().split(/\s+/);
	for (const [flag, value] of Object.entries(values)) {
		const at = words.indexOf(`--${flag}`);
		if (at < 0) throw new Error(`upstream-20l.txt has no --${flag}.`);
		words[at + 1] = String(value);
	}
	return words;
}

/** Upstream fixes the tower's sizes in its code, so its script has no flags to reduce them with. */
const tower = "--vision-num-layers 2 --vision-hidden-size 64 --vision-num-attention-heads 4";

/** Learning rates as upstream logs them: after the step, so that of the next (docs/spec/runtime.md §5). */
const rates = ["1.951546E-04", "1.810927E-04", "1.591907E-04", "1.315927E-04", "1.010000E-04", "7.040732E-05"];

/** Lines as the format strings of Megatron's training_log() make them; fields of our own may follow. */
const line =
	/^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration {1,8}(\d+)\/ {1,7}(\d+) \| consumed samples: {1,12}(\d+) \| elapsed time per iteration \(ms\): (\d+\.\d) \| learning rate: (\d\.\d{6}E[+-]\d\d) \| global batch size: {1,5}(\d+) \| lm loss: (\d\.\d{6}E[+-]\d\d) \| seq_load_balancing_loss: (\d\.\d{6}E[+-]\d\d) \| loss scale: (\d+\.\d) \| grad norm: (\d+\.\d{3}) \| number of skipped iterations: {1,3}(\d+) \| number of nan iterations: {1,3}(\d+) \|(?: .+\|)?$/;

test(
	"the 20-layer script's arguments train on eight ranks",
	() => {
		const steps = full ? 20 : 3;
		const words = script({ ...sizes, "train-iters": steps });
		const { exitCode, stdout, stderr } = mimo(["train", ...words, ...tower.split(" "), "--device", "cpu"]);
		expect([exitCode, stderr]).toEqual([0, ""]);
		const logged = stdout.split("\n").flatMap((text) => {
			const found = line.exec(text);
			return found ? [found.slice(1)] : [];
		});
		expect(logged).toHaveLength(steps);
		for (const [index, [iteration, of, samples, , rate, batch, , balance, , , skipped, nan]] of logged.entries()) {
			expect([iteration, of, samples, batch]).toEqual(
				[index + 1, steps, 8 * (index + 1), 8].map((value) => String(value)),
			);
			expect(rate!).toBe(index < rates.length ? rates[index]! : rate!);
			expect(Number(balance)).toBeWithin(0.99, 1.2);
			expect([skipped, nan]).toEqual(["0", "0"]);
		}
		// ln 1024: nothing is known yet.
		expect(Number(logged[0]![6])).toBeWithin(6.8, 7.1);
		// Flags that are always on, have no effect or run otherwise are reported once.
		for (const said of [
			"Always so here: group-query-attention, moe-grouped-gemm",
			"disable-bias-linear (biases come with add-bias-linear alone",
			"overlap-param-gather (parameters are gathered right after the update",
			"Weight shards run as extra data parallelism with the same 2 data lanes",
		]) {
			expect(stdout.split(said)).toHaveLength(2);
		}
		expect(stdout).toContain("rank 7: pid ");
	},
	full ? 600_000 : 120_000,
);
