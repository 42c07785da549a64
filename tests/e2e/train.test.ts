/** `mimo train` and `mimo parity` as a user runs them. */
import { afterAll, describe, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
import { loggedSteps, SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());
const { folder } = run;
const train = (...flags: string[]) => run.train(flags);

/** Steps of a JSON log without fields that may differ between equal runs. */
function logged(name: string): Record<string, unknown>[] {
	return loggedSteps(join(folder, name)).map(
		({ time: _, elapsed_ms: __, tokens_per_second: ___, modules: ____, memory: _____, ...rest }) => rest,
	);
}

describe("training", () => {
	test("the loss falls, and two runs of one command log the same", () => {
		for (const name of ["first.jsonl", "second.jsonl"]) {
			const { exitCode, stderr, stdout } = train("--train-iters", "25", "--log-json", name, "--log-num-zeros-in-grad");
			expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
			expect(stdout).toMatch(/ iteration {8}5\/ {6}25 \| consumed samples: .* lm loss: \d\.\d{6}E[+-]\d\d \| /);
			expect(stdout).toMatch(/Held-out bits per byte: \d\.\d{4} \(unigram entropy of the same bytes/);
			expect(stdout).toContain("\nThe weights are not kept: neither --save nor --save-hf is given.\n");
		}
		const first = logged("first.jsonl");
		expect(logged("second.jsonl")).toEqual(first);
		const losses = first.map((step) => step["lm loss"] as number);
		expect(losses.at(-1)).toBeLessThan(losses[0]! - 1);
	});

	test("a new run leaves an earlier one's log where it says", () => {
		for (const steps of ["3", "2"]) expect(train("--train-iters", steps, "--log-json", "again.jsonl").exitCode).toBe(0);
		expect([logged("again.1.jsonl").length, logged("again.jsonl").length]).toEqual([3, 2]);
		const { stdout } = train("--train-iters", "2", "--log-json", "again.jsonl", "--save-hf", "kept");
		expect(stdout).toContain("again.jsonl was the log of an earlier run, which was renamed to again.2.jsonl.\n");
		expect(stdout).not.toContain("not kept");
	});

	test("any number of threads logs the same", () => {
		for (const threads of ["1", "2", "3"]) {
			expect(train("--train-iters", "8", "--threads", threads, "--log-json", `${threads}.jsonl`).exitCode).toBe(0);
		}
		expect(logged("2.jsonl")).toEqual(logged("1.jsonl"));
		expect(logged("3.jsonl")).toEqual(logged("1.jsonl"));
	});

	test("experts recomputed in a pipeline balance by the counts that their microbatch had", () => {
		const pipeline =
			"--hybrid-layer-pattern ME*E --llm-pp 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 2";
		const balance = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 --log-interval 1";
		const steps = [
			"",
			" --recompute-granularity full",
			" --recompute-granularity selective --recompute-modules moe",
		].map((recomputed, at) => {
			const flags = `${pipeline} ${balance}${recomputed} --log-json global${at}.jsonl`;
			expect(train(...flags.split(" ")).exitCode).toBe(0);
			return logged(`global${at}.jsonl`);
		});
		expect(steps[0]).toHaveLength(2);
		expect(steps[1]).toEqual(steps[0]!);
		expect(steps[2]).toEqual(steps[0]!);
	}, 30_000);

	test("saved Hugging Face weights go on where they stopped", () => {
		expect(train("--train-iters", "5", "--save-hf", "model").exitCode).toBe(0);
		expect(readdirSync(join(folder, "model")).sort()).toEqual(["config.json", "mimo.json", "model.safetensors"]);
		const loaded = train(
			...[
				"--train-iters",
				"1",
				"--lr-warmup-iters",
				"0",
				"--lr",
				"0",
				"--min-lr",
				"0",
				"--moe-router-bias-update-rate",
				"0",
			],
			...["--load-hf", "model", "--save-hf", "again"],
		);
		expect(loaded.exitCode).toBe(0);
		const bytes = (name: string) => readFileSync(join(folder, name, "model.safetensors"));
		expect(bytes("again").equals(bytes("model"))).toBeTrue();
	});

	test("bf16, dropout and recomputation run", () => {
		const { exitCode, stderr } = train(
			...["--train-iters", "3", "--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"],
			...["--recompute-granularity", "full"],
		);
		expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	});
});

test("examples/text/text.yaml trains, evaluates and leaves its files", () => {
	const config = join(import.meta.dir, "../../examples/text/text.yaml");
	const flags = ["--train-iters", "2", "--lr-warmup-iters", "0", "--split", "99,1,0", ...deviceFlags.split(" ")];
	const files = ["--log-json", join(folder, "book.jsonl"), "--save-hf", join(folder, "book")];
	const { exitCode, stdout, stderr } = mimo(["train", "--config", config, ...flags, ...files]);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toMatch(/Held-out bits per byte: \d\.\d{4} /);
	expect(readdirSync(join(folder, "book")).sort()).toEqual(["config.json", "mimo.json", "model.safetensors"]);
});

describe("parity", () => {
	test("prints a table and exits 0; --json lists every value", () => {
		const reference = golden("layer-moe");
		const table = mimo(["parity", "--golden", reference]);
		expect(table.exitCode).toBe(0);
		expect(table.stdout).toContain("all 23 values agree.");
		const json = JSON.parse(mimo(["parity", "--golden", reference, "--json"]).stdout);
		expect(json.passed).toBeTrue();
		expect(json.checks).toHaveLength(23);
	});

	test("a folder without golden.json is refused", () => {
		const { exitCode, stderr } = mimo(["parity", "--golden", "."], folder);
		expect(exitCode).toBe(1);
		expect(stderr.trim()).toMatch(/is no reference folder/);
	});
});
