/** Checkpoints know no stages: what a pipeline saves every other layout holds bit for bit, through torch_dist too. */
import { afterAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { Scratch } from "../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

// Embedding and output layer share a weight: the first and the last stage hold copies.
const small =
	"--preset nemotron-vlm-tiny --hybrid-layer-pattern M*|E-|ME|* --untie-embeddings-and-output-weights false " +
	"--hidden-size 32 --kv-channels 8 --mamba-num-heads 4 --mamba-num-groups 2 --mamba-head-dim 16 --vision-hidden-size 32 " +
	"--micro-batch-size 2 --global-batch-size 8 --use-distributed-optimizer --lr-warmup-iters 1 --lr-decay-iters 9 " +
	`--log-interval 1 --threads 1 ${deviceFlags}`;

/** Trains up to step `last`; losses of its steps. */
function train(name: string, layout: string, last: number, ...flags: string[]): number[] {
	const log = `${name}-${last}.jsonl`;
	const words = [...small.split(" "), ...layout.split(" "), "--train-iters", String(last), "--log-json", log];
	const save = ["--save", name, "--save-interval", "2"];
	const { exitCode, stderr } = mimo(["train", ...words.filter(Boolean), ...save, ...flags], scratch.path);
	expect([name, exitCode, exitCode === 0 ? "" : stderr]).toEqual([name, 0, ""]);
	const lines = readFileSync(join(scratch.path, log), "utf8").trim().split("\n");
	return lines.flatMap((line) => (JSON.parse(line) as Record<string, number>)["lm loss"] ?? []);
}

function convert(...words: string[]): void {
	const { exitCode, stderr } = mimo(["convert-ckpt", ...words], scratch.path);
	expect([exitCode, stderr]).toEqual([0, ""]);
}

function expectEqual(one: string, other: string): void {
	using a = NativeCheckpoint.open(join(scratch.path, one));
	using b = NativeCheckpoint.open(join(scratch.path, other));
	expect([...b.tensors.keys()].sort()).toEqual([...a.tensors.keys()].sort());
	const bytesOf = (checkpoint: NativeCheckpoint, name: string) => {
		const { buffer, byteOffset, byteLength } = readTensor(checkpoint, name);
		return new Uint8Array(buffer, byteOffset, byteLength);
	};
	const different = [...a.tensors.keys()].filter((name) => Buffer.compare(bytesOf(a, name), bytesOf(b, name)) !== 0);
	expect(different).toEqual([]);
}

test("two stages × two virtual → one process → colocated on four ranks → torch_dist → four stages", () => {
	const whole = train("whole", "", 4);
	const begun = train("stages", "--llm-pp 2", 2);
	// Nothing is trained in between: loaded and saved again.
	expect(train("one", "", 2, "--load", "stages")).toEqual([]);
	expect(train("colocated", "--llm-offset 0 --encoder-dp 4 --llm-tp 2 --llm-pp 2", 2, "--load", "one")).toEqual([]);
	convert("--to", "torch_dist", "colocated", "torch_dist");
	convert("--to", "native", "torch_dist", "back");
	for (const other of ["one", "colocated", "back"]) expectEqual("stages", other);
	const ended = train("four", "--llm-pp 4", 4, "--load", "back");
	expect(ended).toHaveLength(2);
	for (const [step, loss] of [...begun, ...ended].entries()) {
		expect(Math.abs(loss / whole[step]! - 1)).toBeLessThan(2e-6);
	}
}, 60_000);
