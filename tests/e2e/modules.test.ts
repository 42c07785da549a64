/** dist/mimo with three modules: an encoder of frames (`modules`) beside RADIO and the language model. */
import { afterAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { Scratch } from "../data/fixtures.ts";
import { randomValues } from "../support.ts";
import { loggedSteps } from "./small-run.ts";

setDefaultTimeout(120_000);
const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const small =
	"--preset nemotron-vlm-tiny --hybrid-layer-pattern ME|*- --hidden-size 32 --kv-channels 8 --mamba-num-heads 4 " +
	"--mamba-head-dim 16 --mamba-state-dim 8 --vision-num-layers 1 --vision-hidden-size 32 --global-batch-size 8 " +
	`--micro-batch-size 2 --seq-length 64 --log-interval 1 --lr-warmup-iters 0 ${deviceFlags}`;
const audio = {
	...{ name: "audio", kind: "mlp", "placeholder-token-id": 300 },
	...{ frames: 3, "frame-width": 5, "hidden-size": 8 },
};

/** A configuration file whose `modules` has this record. */
function configured(name: string, module: Readonly<Record<string, unknown>> = {}): string {
	const path = join(scratch.path, `${name}.yaml`);
	const lines = Object.entries({ ...audio, ...module }).map(([key, value]) => `${key}: ${JSON.stringify(value)}`);
	writeFileSync(path, `modules:\n  - ${lines.join("\n    ")}\n`);
	return path;
}

function run(command: string, ...flags: readonly string[]) {
	return mimo([command, ...small.split(" "), ...flags], scratch.path);
}

test("every layout computes what one process computes: own grids, shared ones, pipelines", () => {
	const layouts = "1,1+2+1,1+2|pp2,2|1+pp2,1|1|1,tp2+tp2|dp2";
	const { exitCode, stdout, stderr } = run("verify", "--config", configured("verify"), "--layouts", layouts);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	expect(stdout).toContain("All 6 layouts give what one process gives.");
	const sides = run("verify", "--config", configured("verify"), "--layouts", "1+1");
	expect([sides.exitCode, sides.stderr]).toEqual([
		2,
		"mimo: Layout 1+1: it has sides for 1 encoder, and the model has 2.\n",
	]);
});

describe("training", () => {
	const steps = (file: string) =>
		loggedSteps(join(scratch.path, file)).map((step) => [step.iteration, step["lm loss"], step["grad norm"]]);
	const grids = "--llm-pp 2 --encoder-dp 2";

	for (const [name, module] of [
		["disjoint", { dp: 2 }],
		["colocated", { ranks: "language", tp: 2, "lr-mult": 0.5, freeze: "tower" }],
	] as const) {
		test(`${name}: a run goes on from its checkpoint bit by bit, and the report shows three modules`, () => {
			const flags = ["--config", configured(name, module), ...grids.split(" "), "--lr", "1e-3"];
			const whole = run("train", ...flags, "--train-iters", "4", "--log-json", `${name}-whole.jsonl`);
			expect([whole.exitCode, whole.stderr]).toEqual([0, ""]);
			const first = ["--train-iters", "4", "--exit-interval", "2", "--save", `${name}-save`];
			expect(run("train", ...flags, ...first).exitCode).toBe(0);
			const rest = ["--train-iters", "4", "--load", `${name}-save`, "--log-json", `${name}-rest.jsonl`];
			expect(run("train", ...flags, ...rest).exitCode).toBe(0);
			expect(steps(`${name}-rest.jsonl`)).toEqual(steps(`${name}-whole.jsonl`).slice(2));
			expect(steps(`${name}-whole.jsonl`)).toHaveLength(4);
			expect(mimo(["report", `${name}-whole.jsonl`, "--output", `${name}.html`], scratch.path).exitCode).toBe(0);
			const page = readFileSync(join(scratch.path, `${name}.html`), "utf8");
			for (const module of ["radio_encoder", "audio", "language"]) expect(page).toContain(module);
		});
	}

	test("reads its frames from a file, by the number of the sample", () => {
		const [samples, length] = [16, 64];
		const ids = Int32Array.from({ length: samples * (length + 1) }, (_, at) => {
			const place = at % (length + 1);
			return place > 0 && place <= 3 ? 300 : at % 97;
		});
		writeSafetensors(join(scratch.path, "tokens.safetensors"), [
			{ name: "tokens", dtype: "I32", shape: [samples, length + 1], data: () => ids },
		]);
		const frames = (name: string, shape: readonly number[], seed: number) =>
			writeSafetensors(join(scratch.path, name), [
				{
					name: "frames",
					dtype: "F32",
					shape: [...shape],
					data: () =>
						randomValues(
							shape.reduce((a, b) => a * b),
							seed,
						),
				},
			]);
		frames("one.safetensors", [samples, 3, 5], 1);
		frames("two.safetensors", [samples, 3, 5], 2);
		frames("wide.safetensors", [samples, 3, 6], 1);
		const train = (file: string, log: string) => {
			const config = configured(file, { "data-path": `${file}.safetensors` });
			const data = ["--data-path", "tokens.safetensors", "--llm-only", "--train-iters", "2", "--log-json", log];
			return run("train", "--config", config, ...data);
		};
		expect(train("one", "one.jsonl").stderr).toBe("");
		expect(train("one", "again.jsonl").exitCode).toBe(0);
		expect(train("two", "two.jsonl").exitCode).toBe(0);
		expect(steps("again.jsonl")).toEqual(steps("one.jsonl"));
		expect(steps("two.jsonl")[0]![1]).not.toEqual(steps("one.jsonl")[0]![1]);
		expect(train("wide", "wide.jsonl").stderr).toContain("frames and frame-width need F32 [samples, 3, 5]");
	});

	test("bf16 beside an fp32 language model", () => {
		const { exitCode, stderr } = run(
			"train",
			"--config",
			configured("bf16", { precision: "bf16" }),
			"--train-iters",
			"2",
		);
		expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	});
});

test("plan, --print-schedule, --print-topology and --print-config show three modules", () => {
	const flags = ["--config", configured("shown"), "--train-iters", "2"];
	const plan = run("plan", ...flags, "--gpu", "h200").stdout;
	for (const row of [/radio_encoder +0 /, /audio +1 /, /language +2 /]) expect(plan).toMatch(row);
	const schedule = run("train", ...flags, "--print-schedule").stdout.split("\n");
	expect(schedule.slice(1, 4).map((line) => line.trim().split(/ {2,}/).slice(0, 2).join(" "))).toEqual([
		"radio_encoder 0",
		"audio 1",
		"stage 0 2",
	]);
	expect(run("train", ...flags, "--print-topology").stdout).toContain("edge.audio          [1,2]");
	expect(run("train", ...flags, "--print-config").stdout).toContain('"placeholder-token-id":300');
});

test("a mistake is one sentence that names the module and its key", () => {
	const cases: readonly (readonly [Record<string, unknown>, string])[] = [
		[{ tp: 0 }, "tp of audio is 0; allowed is an integer of at least 1"],
		[{ kind: "clap" }, 'kind of audio is "clap"; allowed is mlp'],
		[{ name: "Audio" }, 'name of Audio is "Audio"; allowed is a name of small letters, digits and _'],
		[{ name: "language" }, "name language is taken; every module has its own"],
		[{ frames: null }, "frames of audio is missing; give an integer of at least 1"],
		[{ pictures: 3 }, "audio has no key pictures"],
		[{ "placeholder-token-id": 511 }, "placeholder-token-id 511 of audio is image-token-id"],
		[{ "placeholder-token-id": 512 }, "placeholder-token-id 512 of audio is outside vocab-size 512"],
		[{ ranks: "language", dp: 2 }, "tp × dp of audio is 2; on the language model's ranks allowed is their number (1)"],
		[{ dp: 3 }, "dp of audio is 3; allowed is a number that divides micro-batch-size × data lanes (2)"],
		[{ tp: 3 }, "tp of audio is 3; allowed is a divisor of its widths, such as 8"],
	];
	for (const [index, [module, message]] of cases.entries()) {
		const { exitCode, stderr } = run("train", "--config", configured(`wrong-${index}`, module), "--train-iters", "1");
		expect([exitCode, stderr]).toEqual([2, expect.stringContaining(message)]);
		expect(stderr).toContain(`wrong-${index}.yaml:1: modules is`);
	}
	const stages = run("verify", "--config", configured("stages"), "--layouts", "1+pp2+1");
	expect(stages.stderr).toBe("mimo: Layout 1+pp2+1: audio has no pipeline stages; allowed is pp 1.\n");
	const { stderr } = run("train", "--modules", "audio", "--train-iters", "1");
	expect(stderr).toBe(
		'mimo: --modules: the value is "audio"; allowed is a list of modules, each with keys of its own.\n',
	);
});
