/**
 * Functional tests of Megatron-LM as its files have them, sizes reduced: the elastic nightly test and that of the fused experts, on
 * indexed data with GPT-2's tokenizer files, compared with golden values by their own tolerances.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { mimo } from "../commands/mimo.ts";
import { Scratch } from "../data/fixtures.ts";
import { writeSet } from "../data/megatron/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const config = (name: string) => join(import.meta.dir, `../config/upstream/${name}.yaml`);
const data = join(scratch.path, "data", "text/common_pile/v01_filtered_data");
const environment = {
	DATA_PATH: join(scratch.path, "data"),
	DATA_CACHE_PATH: join(scratch.path, "cache"),
	TENSORBOARD_PATH: join(scratch.path, "tensorboard"),
	CHECKPOINT_SAVE_PATH: join(scratch.path, "checkpoints"),
};

beforeAll(() => {
	mkdirSync(join(data, "bpe"), { recursive: true });
	writeSet(join(data, "my-gpt3_00_text_document"), {
		name: "text",
		seed: 7,
		sequences: 20_000,
		longest: 60,
		dtype: "uint16",
	});
	for (const name of ["vocab.json", "merges.txt"]) {
		const packed = readFileSync(join(import.meta.dir, `../golden/tokenizers/${name}.zst`));
		writeFileSync(join(data, "bpe", name), Bun.zstdDecompressSync(packed));
	}
});

/** Trains on as many ranks as the test needs at these sizes. */
function train(name: string, more: string) {
	const line = `train --config ${config(name)} --vocab-size 1024 --seq-length 64 --max-position-embeddings 64 ${more}`;
	return mimo([...line.split(" "), "--device", "cpu", "--threads", "1"], scratch.path, environment);
}

test("the elastic nightly test trains, and its golden values are compared as it does", () => {
	const sizes =
		"--hidden-size 64 --ffn-hidden-size 32 --num-attention-heads 8 --kv-channels 16 --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16 --num-experts 8 --moe-shared-expert-intermediate-size 32";
	const choices = "--emb-int-list 64 48 32 --mlp-int-list 32 24 16 --mamba-int-list 8 6 4 --moe-expert-int-list 8 6 4";
	const log = join(scratch.path, "log.jsonl");
	const length = `--train-iters 3 --global-batch-size 4 --lr-warmup-fraction 0.4 --log-json ${log}`;
	const { exitCode, stdout, stderr } = train("elastic-nightly", `${sizes} ${choices} ${length} --nproc 4`);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout.match(/ iteration +\d+\/ +3 \|.*lm loss \(budget\)/g)).toHaveLength(3);

	// Golden values of this very run agree with its log and with its TensorBoard folder; others do not.
	const steps = readFileSync(log, "utf8")
		.trim()
		.split("\n")
		.map((text) => JSON.parse(text))
		.filter((entry) => "lm loss" in entry && !("split" in entry));
	const series = (values: readonly number[]) => ({
		...{ start_step: 1, end_step: values.length, step_interval: 1 },
		values: Object.fromEntries(values.map((value, step) => [step + 1, value])),
	});
	const compare = (factor: number, own: string) => {
		const golden = join(scratch.path, "golden_values.json");
		const losses = series(steps.map((entry) => factor * entry["lm loss"]));
		writeFileSync(
			golden,
			JSON.stringify({ "lm loss": losses, "num-zeros": series(steps.map((entry) => 1.15 * entry.num_zeros)) }),
		);
		return mimo(["parity", "--golden", golden, "--config", config("elastic-nightly"), "--log", own]).exitCode;
	};
	expect([compare(1.04, log), compare(1.04, environment.TENSORBOARD_PATH), compare(1.06, log)]).toEqual([0, 0, 1]);
}, 180_000);

test("the fused experts' test trains: a GPT model with Sinkhorn's balancing", () => {
	const { exitCode, stdout, stderr } = train(
		"op-fuser",
		"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --train-iters 2 --global-batch-size 4 --lr-decay-iters 4 --lr-warmup-fraction 0.3",
	);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toContain("hybrid-layer-pattern is [*E][*E].");
	expect(stdout.match(/ iteration +\d+\/ +2 \|/g)).toHaveLength(2);
}, 180_000);
