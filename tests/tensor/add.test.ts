import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { add } from "../../src/tensor/ops/add.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

describe("add", () => {
	for (const [rows, width] of [
		[3, 5],
		[29, 31],
		[0, 4],
	] as const) {
		test(`[${rows}, ${width}]`, () => {
			checkGradients(device, {
				inputs: {
					a: { values: randomValues(rows * width, 1), shape: [rows, width] },
					b: { values: randomValues(rows * width, 2), shape: [rows, width] },
				},
				forward: (tape, { a, b }) => add(tape, a!, b!),
				reference: ({ a, b }) => a!.map((value, i) => value + b![i]!),
			});
		});
	}

	test("both gradients are the output's own, without a copy", () => {
		const inputs = [1, 2].map((seed) => {
			using plain = Tensor.from(device, randomValues(6, seed), [2, 3]);
			return plain.withGradient(new GradientSlot(device, [2, 3], "f32"));
		});
		const tape = new Tape(device, { recording: true });
		using y = add(tape, inputs[0]!, inputs[1]!);
		const dy = Tensor.from(device, randomValues(6, 3), [2, 3]);
		y.gradient!.accumulate(dy);
		const blocks = device.memoryStatistics().liveBlocks;
		tape.backward();
		expect(device.memoryStatistics().liveBlocks).toBe(blocks);
		for (const input of inputs) {
			using gradient = input.gradient!.take()!;
			expect(gradient.allocation).toBe(dy.allocation);
			input[Symbol.dispose]();
		}
	});

	test("rounds a bf16 sum once, to nearest even", () => {
		using a = Tensor.from(device, Float32Array.of(1, 1, 256), [3], { dtype: "bf16" });
		using b = Tensor.from(device, Float32Array.of(2 ** -8, 3 * 2 ** -8, 1), [3], { dtype: "bf16" });
		using y = add(new Tape(device, { recording: false }), a, b);
		expect([...y.toFloat32()]).toEqual([1, 1 + 2 ** -6, 256]);
	});
});
