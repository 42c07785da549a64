/** `mimo train` beside a teacher, as a user runs it: from every format, on layouts, and from the parent itself. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync, rmSync } from "node:fs";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { Scratch } from "../../data/fixtures.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

const training = `train --preset nemotron-tiny --hidden-size 64 --hybrid-layer-pattern ME|*- --seq-length 64 --lr-warmup-iters 1 --lr 3e-3 --lr-decay-iters 40 --dataset-provider text --data-path text.txt ${deviceFlags}`;
const elastic =
	"--flextron --enable-router --emb-int-list 64 48 --mlp-int-list 128 64 --budget-list 0.7 --original-model-sample-prob 0.4 --moe-router-bias-update-rate 0";

function run(command: string): string {
	const { exitCode, stdout, stderr } = mimo(command.split(" "), folder.path);
	expect([command, exitCode, stderr.includes("mimo:") ? stderr : ""]).toEqual([command, 0, ""]);
	return stdout;
}

/** The losses of a training's last step by name. */
function lossesOf(flags: string): Record<string, number> {
	run(`${training} --log-json log.jsonl --train-iters 4 ${flags}`);
	const lines = readFileSync(`${folder.path}/log.jsonl`, "utf8").trim().split("\n");
	rmSync(`${folder.path}/log.jsonl`);
	return lines.map((line) => JSON.parse(line)).findLast((line) => "grad_norm" in line);
}

/** Names of a native checkpoint's weights. */
function weightsOf(checkpoint: string): string[] {
	const { tensors } = JSON.parse(readFileSync(`${folder.path}/${checkpoint}/index.json`, "utf8"));
	return Object.keys(tensors).filter((name) => !name.startsWith("optimizer."));
}

beforeAll(() => {
	folder.file("text.txt", "the quick brown fox jumps over the lazy dog and runs away. ".repeat(80));
	run(`${training} --train-iters 20 --save native --save-interval 20`);
	run("convert-ckpt --to hf native hf");
	run("convert-ckpt --to torch_dist native torch_dist");
}, 60_000);

test("a teacher of every format teaches the same, and so it does on every layout", () => {
	const losses = [
		"native",
		"hf",
		"torch_dist",
		"native --llm-tp 2 --llm-ep 2",
		"native --llm-pp 2",
		"native --llm-dp 2 --use-distributed-optimizer",
	].map((teacher) => lossesOf(`--export-kd-teacher-load ${teacher} --export-kd-temperature 2`));
	const names = ["lm loss", "logits distillation loss", "total loss"];
	for (const name of names) {
		expect(losses[0]![name]!).toBeGreaterThan(0.01);
		for (const own of losses) expect(Math.abs(own[name]! / losses[0]![name]! - 1)).toBeLessThan(1e-4);
	}
}, 60_000);

test("a teacher of other layers and sizes teaches the same from every format, and on layouts", () => {
	folder.file("teacher.yaml", "hidden_size: 64\nhybrid-layer-pattern: ME*-\n");
	const student = "--hybrid-layer-pattern *-*- --hidden-size 32 --num-attention-heads 2 --export-kd-alpha 0.25";
	const losses = [
		"native",
		"hf",
		"torch_dist",
		"native --export-kd-teacher-model-config teacher.yaml",
		"native --export-kd-teacher-model-config hf",
		"native --llm-tp 2",
		"native --llm-pp 2",
	].map((teacher) => lossesOf(`${student} --export-kd-teacher-load ${teacher}`));
	const [first] = losses as [Record<string, number>];
	const [labels, divergence, total] = ["lm loss", "logits distillation loss", "total loss"].map((name) => first[name]!);
	expect(divergence!).toBeGreaterThan(0.1);
	expect(total!).toBeCloseTo(0.75 * labels! + 0.25 * divergence!, 5);
	for (const own of losses) expect(Math.abs(own["total loss"]! / total! - 1)).toBeLessThan(1e-4);
}, 60_000);

test("an elastic student has its teacher's divergence by budget, and its checkpoint no teacher", () => {
	const flags = `${elastic} --load native --finetune --save student --save-interval 4`;
	const losses = lossesOf(`${flags} --export-kd-teacher-load native`);
	const divergence = "logits distillation loss";
	expect(Object.keys(losses)).toContain(`${divergence} 0.700`);
	expect(losses[`${divergence} 0.700`]!).toBeGreaterThan(10 * (losses[`${divergence} 1.000`] ?? 0));
	const own = weightsOf("student/iter_0000004").filter((name) => !name.startsWith("elastic_router."));
	expect(own).toEqual(weightsOf("native/iter_0000020"));
}, 60_000);

test("the parent teaches its own submodels", () => {
	const losses = lossesOf(`${elastic} --load native --finetune --self-distillation`);
	expect(losses["logits distillation loss 0.700"]!).toBeGreaterThan(1e-3);
	expect(losses["logits distillation loss 1.000"]).toBeUndefined();
}, 60_000);

test.each([
	[
		"--export-kd-temperature 2",
		"--export-kd-temperature: the value is 2; it needs export-kd-teacher-load or self-distillation.",
	],
	["--self-distillation", "--self-distillation: the value is true; it needs flextron."],
	[
		`${elastic} --self-distillation --export-kd-teacher-load native`,
		"--self-distillation: the value is true; allowed is one of it and export-kd-teacher-load.",
	],
	["--export-kd-teacher-load none", "none"],
	["--export-kd-teacher-load native --vocab-size 300", "The teacher native has 256 tokens, and the student 300."],
	["--export-kd-teacher-load native --export-kd-teacher-model-config none.yaml", "none.yaml: there is no such file"],
])("%s is refused", (flags, part) => {
	const { exitCode, stderr } = mimo(`${training} --train-iters 1 ${flags}`.split(" "), folder.path);
	expect([exitCode > 0, stderr.trim().split("\n").length, stderr.startsWith("mimo: ")]).toEqual([true, 1, true]);
	expect(stderr).toContain(part);
});
