/** `mimo train` with Adam's moments stored, and gradients summed over replicas, in bf16. */
import { afterAll, expect, test } from "bun:test";
import { loggedSteps, SmallRun } from "./small-run.ts";

const small = new SmallRun();
afterAll(() => small[Symbol.dispose]());

const lanes = "--llm-dp 2 --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --log-interval 1";
const moments = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16";
const narrow = `${moments} --grad-reduce-in-bf16`;

function train(name: string, flags: string, warnings: readonly string[] = []): number[] {
	const args = `${lanes} ${flags} --log-json ${name}.jsonl`.split(" ");
	const { exitCode, stderr } = small.train(args);
	expect({ exitCode, ended: exitCode === 0 ? "" : stderr }).toEqual({ exitCode: 0, ended: "" });
	for (const warning of warnings) expect(stderr).toContain(warning);
	if (warnings.length === 0) expect(stderr).toBe("");
	return loggedSteps(small.path(`${name}.jsonl`)).map(({ "lm loss": loss }) => loss as number);
}

test("the loss falls as in fp32, and ZeRO-1 changes no bit", () => {
	const fp32 = train("fp32", "--train-iters 20");
	const bf16 = train("bf16", `--train-iters 20 ${narrow}`);
	const zero = `--use-distributed-optimizer --overlap-grad-reduce --lr-decay-iters 20`;
	const steps = process.env.MIMO_TEST_FULL === "1" ? 20 : 6;
	expect(train("zero", `--train-iters ${steps} ${narrow} ${zero}`)).toEqual(bf16.slice(0, steps));
	expect(bf16).not.toEqual(fp32);
	expect(bf16.at(-1)!).toBeLessThan(bf16[0]! - 1);
	for (const [step, loss] of bf16.entries()) expect(Math.abs(loss / fp32[step]! - 1)).toBeLessThan(0.01);
}, 60_000);

test("a training goes on as if it had not ended, and says what another precision does to its moments", () => {
	const whole = train("whole", `--train-iters 6 ${narrow}`);
	const first = train("first", `--train-iters 3 ${narrow} --save kept --save-interval 3 --lr-decay-iters 6`);
	const then = train("then", `--train-iters 6 ${narrow} --load kept`);
	expect([...first, ...then]).toEqual(whole);
	train("other", "--train-iters 4 --lr-decay-iters 6 --load kept", [
		"was trained with exp-avg-dtype bf16, this run has fp32: what it holds is widened.",
		"was trained with exp-avg-sq-dtype bf16, this run has fp32: what it holds is widened.",
		"was trained with gradients summed in bf16, this run sums them in fp32 (grad-reduce-in-bf16).",
	]);
}, 60_000);
