import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { addBias } from "../../src/tensor/ops/grouped-bias.ts";
import { groupedLinear } from "../../src/tensor/ops/grouped-linear.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";
import { offsetsOf } from "./expert-reference.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

describe("addBias", () => {
	for (const loads of [[3, 0, 5, 131], [0, 0], [7], [0, 200, 0]]) {
		for (const weighted of [false, true]) {
			test(`experts with ${loads.join(", ")} rows${weighted ? ", weighted" : ""}`, () => {
				const [inputs, width] = [2, 13];
				const rows = loads.reduce((sum, load) => sum + load, 0);
				using offsets = Tensor.from(device, offsetsOf(loads));
				checkGradients(device, {
					inputs: {
						x: { values: randomValues(rows * inputs, 1), shape: [rows, inputs] },
						...(weighted && { p: { values: randomValues(rows, 2), shape: [rows] } }),
					},
					parameters: {
						w: { values: randomValues(loads.length * width * inputs, 3), shape: [loads.length, width, inputs] },
						b: { values: randomValues(loads.length * width, 4), shape: [loads.length, width] },
					},
					forward: (tape, { x, p }, { w, b }) =>
						addBias(tape, groupedLinear(tape, x!, w!, offsets), b!, { offsets, factor: p ?? null }),
					reference: ({ x, p, w, b }) => {
						const starts = offsetsOf(loads);
						return Float64Array.from({ length: rows * width }, (_, i) => {
							const [row, column] = [Math.floor(i / width), i % width];
							const g = loads.findIndex((_, at) => row < starts[at + 1]!);
							let sum = (p?.[row] ?? 1) * b![g * width + column]!;
							for (let k = 0; k < inputs; k++) {
								sum += x![row * inputs + k]! * w![(g * width + column) * inputs + k]!;
							}
							return sum;
						});
					},
				});
			});
		}
	}

	test("one bias for all rows, the rows without a gradient", () => {
		using bias = new Parameter("b", Tensor.from(device, Float32Array.of(1, 2)), Tensor.zeros(device, [2]));
		const tape = new Tape(device, { recording: true });
		const rows = Tensor.from(device, Float32Array.of(10, 20, 30, 40, 50, 60), [3, 2]);
		using y = addBias(tape, rows, bias);
		expect([...y.toFloat32()]).toEqual([11, 22, 31, 42, 51, 62]);
		y.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 2, 3, 4, 5, 6), [3, 2]));
		tape.backward();
		expect([...bias.mainGradient!.toFloat32()]).toEqual([9, 12]);
	});

	test("adds to what is in the gradient, and leaves rows past the last offset alone", () => {
		using offsets = Tensor.from(device, Int32Array.of(0, 1, 2));
		using bias = new Parameter(
			"b",
			Tensor.from(device, Float32Array.of(1, 2), [2, 1]),
			Tensor.from(device, Float32Array.of(100, 200), [2, 1]),
		);
		using plain = Tensor.from(device, Float32Array.of(5, 6, Number.NaN), [3, 1]);
		const tape = new Tape(device, { recording: true });
		using y = addBias(tape, plain.withGradient(new GradientSlot(device, [3, 1], "f32")), bias, { offsets });
		expect([...y.toFloat32()]).toEqual([6, 8, Number.NaN]);
		y.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 2, Number.NaN), [3, 1]));
		tape.backward();
		expect([...bias.mainGradient!.toFloat32()]).toEqual([101, 202]);
		y.gradient!.clear();
	});

	test("refuses a bias that does not fit", () => {
		using bias = new Parameter("layer.bias", Tensor.zeros(device, [2, 3]), null);
		const tape = new Tape(device, { recording: false });
		using rows = Tensor.zeros(device, [4, 3]);
		expect(() => addBias(tape, rows, bias)).toThrow("layer.bias of shape [2,3] cannot be added to rows of shape [4,3]");
	});
});
