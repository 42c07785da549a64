/** An elastic training that goes on from the middle, as a user resumes it (docs/spec/elastic.md §15). */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { Scratch } from "../../data/fixtures.ts";
import { relativeRms } from "../../support.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

const plain = `train --preset nemotron-tiny --hidden-size 64 --hybrid-layer-pattern ME|*E --seq-length 64 --lr-warmup-iters 1 --lr 3e-3 --dataset-provider text --data-path text.txt ${deviceFlags} --moe-router-bias-update-rate 0 --train-iters 12`;
const lists =
	"--emb-int-list 64 48 32 --mamba-int-list 8 4 --mlp-int-list 128 64 --moe-expert-int-list 8 4 --head-int-list 4 2 --flex-hetero-ffn --add-skipping --layer-ranking-list 1";
const elastic = `${plain} --flextron --enable-router ${lists} --budget-list 1 0.6 --lr-mult-router 10`;

function run(command: string): string {
	const { exitCode, stderr } = mimo(command.split(" "), folder.path);
	expect([command, exitCode, stderr.includes("mimo:") ? stderr : ""]).toEqual([command, 0, ""]);
	return stderr;
}

function refusal(command: string): string {
	const { exitCode, stderr } = mimo(command.split(" "), folder.path);
	expect([command, exitCode > 0]).toEqual([command, true]);
	return stderr;
}

/** Every tensor of step 12, optimizer state too. */
function tensorsOf(checkpoint: string): Map<string, Float32Array> {
	using store = NativeCheckpoint.open(`${folder.path}/${checkpoint}/iter_0000012`);
	return new Map([...store.tensors.keys()].map((name) => [name, readTensor(store, name) as Float32Array]));
}

/** Losses of the steps behind 6, by name. */
function losses(log: string) {
	const lines = readFileSync(`${folder.path}/${log}`, "utf8").trim().split("\n");
	const steps = lines.map((line) => JSON.parse(line)).filter((line) => "grad_norm" in line && line.iteration > 6);
	return steps.map((step) =>
		["lm loss", "budget loss", "lm loss (full)", "grad_norm"].map((name) => step[name] ?? null),
	);
}

beforeAll(() => {
	folder.file("text.txt", "the quick brown fox jumps over the lazy dog and runs away. ".repeat(80));
	run(`${elastic} --save whole --save-interval 6 --log-json whole.jsonl`);
	run(`${plain} --train-iters 6 --save base --save-interval 6`);
}, 60_000);

const resumed = `${elastic} --load whole --ckpt-step 6`;
const saved = `${resumed} --save-interval 12`;

test("on one layout every bit is the same, whatever was evaluated in between", () => {
	run(`${saved} --save again --log-json again.jsonl --eval-interval 2 --eval-iters 1`);
	expect(losses("again.jsonl")).toEqual(losses("whole.jsonl"));
	expect(losses("again.jsonl")).toHaveLength(6);
	expect(tensorsOf("again")).toEqual(tensorsOf("whole"));
}, 60_000);

test.each(["--llm-tp 2 --llm-ep 2", "--llm-pp 2"])(
	"with %s it is the same up to rounding",
	(layout) => {
		const name = layout.replaceAll(/[- ]/g, "");
		run(`${saved} --save ${name} --log-json ${name}.jsonl ${layout}`);
		const [own, other] = [losses("whole.jsonl"), losses(`${name}.jsonl`)];
		for (const [step, values] of own.entries()) {
			for (const [at, value] of values.entries()) {
				if (value === null) expect(other[step]![at]).toBeNull();
				else expect(Math.abs(other[step]![at]! - value)).toBeLessThan(2e-5 * Math.max(1, value));
			}
		}
		const [whole, weights] = [tensorsOf("whole"), tensorsOf(name)];
		for (const [name, values] of whole) {
			if (name.startsWith("elastic_router.")) expect(relativeRms(weights.get(name)!, values)).toBeLessThan(1e-4);
		}
		expect([...weights.keys()].toSorted()).toEqual([...whole.keys()].toSorted());
	},
	60_000,
);

test("the router's keys are the same whatever the layout, and one for a gate's layer", () => {
	const gates = [...tensorsOf("whole").keys()].filter((name) => name.startsWith("elastic_router."));
	expect(gates.toSorted()).toEqual(
		["emb", "head", "mamba", "mlp", "moe_expert", "skip_layer"].flatMap((gate) =>
			[0, 2].map((layer) => `elastic_router.gate_${gate}.${layer}.weight`),
		),
	);
});

test("a parent without a router begins with a new one and says so; another family is refused", () => {
	expect(run(`${elastic} --load base --finetune`)).toContain("router");
	const other = (from: string, to: string) => refusal(resumed.replace(from, to));
	expect(other("--emb-int-list 64 48 32", "--emb-int-list 64 32")).toMatch(
		/^mimo: .*--emb-int-list is .* there and .* here/,
	);
	expect(other("--budget-list 1 0.6", "--budget-list 1 0.7 0.6")).toMatch(
		/^mimo: .*--budget-list is .* there and .* here/,
	);
}, 60_000);
