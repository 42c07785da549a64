/** `mimo train --optimizer muon`: the same training on every layout, and what its checkpoints are good for. */
import { afterAll, expect, test } from "bun:test";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { loggedSteps, SmallRun } from "./small-run.ts";

const small = new SmallRun();
afterAll(() => small[Symbol.dispose]());

const muon = "--optimizer muon --muon-extra-scale-factor 0.2 --lr 3e-3";
const flags = `${muon} --micro-batch-size 2 --global-batch-size 8 --log-interval 1`;

function train(name: string, more: string): number[] {
	const { exitCode, stderr } = small.train(`${flags} ${more} --log-json ${name}.jsonl`.split(" "));
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	return loggedSteps(small.path(`${name}.jsonl`)).map(({ "lm loss": loss }) => loss as number);
}

function refused(more: string): string {
	const { exitCode, stderr } = small.train(`${flags} ${more}`.split(" "));
	expect(exitCode).not.toBe(0);
	return stderr.trim();
}

test("the loss falls, ZeRO-1 and buckets change no bit, and a layout only roundings", () => {
	const plain = train("plain", "--train-iters 6 --llm-dp 2");
	expect(plain.at(-1)!).toBeLessThan(plain[0]! - 0.5);
	const zero = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 3000";
	expect(train("zero", `--train-iters 6 --llm-dp 2 ${zero}`)).toEqual(plain);
	const cut = train("cut", "--train-iters 6 --llm-tp 2 --use-distributed-optimizer");
	for (const [step, loss] of cut.entries()) expect(Math.abs(loss / plain[step]! - 1)).toBeLessThan(1e-5);
}, 90_000);

test("a training goes on bit for bit, and on another layout", () => {
	const sharded = "--llm-dp 2 --use-distributed-optimizer";
	const whole = train("whole", `--train-iters 6 ${sharded}`);
	const kept = "--save kept --save-interval 3 --lr-decay-iters 6";
	const first = train("first", `--train-iters 3 ${sharded} ${kept}`);
	expect([...first, ...train("then", `--train-iters 6 ${sharded} --load kept`)]).toEqual(whole);
	const other = train("other", "--train-iters 6 --llm-tp 2 --load kept");
	for (const [step, loss] of other.entries()) expect(Math.abs(loss / whole[3 + step]! - 1)).toBeLessThan(1e-5);
	expect(refused("--train-iters 6 --load kept --optimizer adam")).toMatch(
		/was trained with optimizer muon, this run has adam; --no-load-optim goes on with a new one\.$/,
	);
	const convert = (more: string[]) =>
		mimo(["convert-ckpt", "kept", "out", "--to", "torch_dist", ...more], small.folder);
	expect(convert([]).stderr).toContain("whose momenta torch_dist checkpoints do not get here");
	expect(convert(["--no-optimizer"]).exitCode).toBe(0);
}, 90_000);

test("adapters are refused", () => {
	expect(refused("--train-iters 2 --lora-rank 4")).toMatch(/optimizer.*muon.*allowed with lora-rank is adam/);
});

test("verify: the update of every layout is that of one process, also of gated rows that tensor-parallel ranks hold in halves", () => {
	const { exitCode, stdout } = mimo([
		...`verify --preset nemotron-vlm-tiny --hybrid-layer-pattern EE*- --squared-relu false --swiglu --hidden-size 32 ${deviceFlags}`.split(
			" ",
		),
		...`--kv-channels 8 --vision-num-layers 1 --vision-hidden-size 32 --global-batch-size 4`.split(" "),
		...`--micro-batch-size 1 --layouts dp2|dp2ep2,tp2+tp2dp2etp2,dp2|pp2 --optimizer muon --muon-nesterov`.split(" "),
	]);
	expect(stdout).toEndWith("All 3 layouts give what one process gives.\n");
	expect(exitCode).toBe(0);
}, 90_000);
