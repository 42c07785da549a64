/** Losses of hidden states against float64. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { hiddenLoss } from "../../src/tensor/ops/hidden-loss.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const [tokens, width] = [5, 37];
const teacher = randomValues(tokens * width, 4, 2);
const references = {
	cosine: (s: number[], t: number[]) => {
		const dot = (a: number[], b: number[]) => a.reduce((sum, x, i) => sum + x * b[i]!, 0);
		return 1 - dot(s, t) / Math.sqrt((dot(s, s) + 1e-12) * (dot(t, t) + 1e-12));
	},
	mse: (s: number[], t: number[]) => s.reduce((sum, x, i) => sum + (x - t[i]!) ** 2, 0) / s.length,
};

for (const kind of ["cosine", "mse"] as const) {
	test(`${kind}`, () => {
		using other = Tensor.from(device, teacher, [tokens, width]);
		checkGradients(device, {
			inputs: { student: { values: randomValues(tokens * width, 3, 2), shape: [tokens, width] } },
			forward: (tape, x) => hiddenLoss(tape, x.student!, other, { kind }),
			reference: ({ student }) => {
				const row = (of: ArrayLike<number>, at: number) => Array.from(of).slice(at * width, (at + 1) * width);
				return Float64Array.from({ length: tokens }, (_, at) => references[kind](row(student!, at), row(teacher, at)));
			},
		});
	});
}

test("states of a student and a teacher of other shapes are refused", () => {
	using one = Tensor.zeros(device, [tokens, width]);
	using other = Tensor.zeros(device, [tokens, width + 1]);
	const tape = new Tape(device, { recording: false });
	expect(() => hiddenLoss(tape, one, other, { kind: "mse" })).toThrow("do not match");
});
