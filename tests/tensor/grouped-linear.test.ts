import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { groupedLinear } from "../../src/tensor/ops/grouped-linear.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { openDevices } from "./devices.ts";

let device: Device;
let single: Device;
openDevices((two, one) => {
	[device, single] = [two, one];
});

/** First row of every expert and the end, from their loads. */
function offsetsOf(loads: readonly number[]): Int32Array {
	let total = 0;
	return Int32Array.from([0, ...loads], (load) => (total += load));
}

function reference(x: ArrayLike<number>, w: ArrayLike<number>, loads: readonly number[], outputs: number) {
	const offsets = offsetsOf(loads);
	const rows = offsets.at(-1)!;
	const inputs = w.length / loads.length / outputs;
	const y = new Float64Array(rows * outputs);
	for (let g = 0; g < loads.length; g++) {
		for (let r = offsets[g]!; r < offsets[g + 1]!; r++) {
			for (let o = 0; o < outputs; o++) {
				let sum = 0;
				for (let i = 0; i < inputs; i++) sum += x[r * inputs + i]! * w[(g * outputs + o) * inputs + i]!;
				y[r * outputs + o] = sum;
			}
		}
	}
	return y;
}

describe("groupedLinear", () => {
	for (const [name, loads] of [
		["uneven loads", [3, 1, 5, 2]],
		["experts without rows", [0, 4, 0, 0, 3, 0]],
		["all rows on one expert", [0, 0, 11, 0]],
		["zero rows", [0, 0, 0]],
		["a single expert", [7]],
	] as const) {
		test(name, () => {
			const [inputs, outputs] = [6, 9];
			const rows = loads.reduce<number>((a, b) => a + b, 0);
			using offsets = Tensor.from(device, offsetsOf(loads));
			checkGradients(device, {
				inputs: { x: { values: randomValues(rows * inputs, 1), shape: [rows, inputs] } },
				parameters: {
					w: { values: randomValues(loads.length * outputs * inputs, 2), shape: [loads.length, outputs, inputs] },
				},
				forward: (tape, { x }, { w }) => groupedLinear(tape, x!, w!, offsets),
				reference: ({ x, w }) => reference(x!, w!, loads, outputs),
			});
		});
	}

	/** Forward and backward of larger products, more than one block in every direction. */
	function run(on: Device, dtype: "f32" | "bf16") {
		const [loads, inputs, outputs] = [[300, 0, 7, 64], 530, 600];
		const rows = 371;
		const capacity = rows + 5;
		const values = randomValues(capacity * inputs, 3).fill(Number.NaN, rows * inputs);
		using offsets = Tensor.from(on, offsetsOf(loads));
		using plain = Tensor.from(on, values, [capacity, inputs], { dtype });
		using x = plain.withGradient(new GradientSlot(on, plain.shape, dtype));
		const weights = randomValues(loads.length * outputs * inputs, 4, 0.05);
		const shape = [loads.length, outputs, inputs];
		const gradient = new Float32Array(weights.length).fill(1);
		using w = new Parameter("w", Tensor.from(on, weights, shape, { dtype }), Tensor.from(on, gradient, shape));
		const tape = new Tape(on, { recording: true });
		using y = groupedLinear(tape, x, w, offsets);
		const dy = randomValues(capacity * outputs, 5).fill(Number.NaN, rows * outputs);
		using upstream = Tensor.from(on, dy, [capacity, outputs], { dtype });
		y.gradient!.accumulate(upstream.share());
		const result = {
			loads,
			outputs,
			x: plain.toFloat32().subarray(0, rows * inputs),
			w: w.value.toFloat32(),
			dy: upstream.toFloat32().subarray(0, rows * outputs),
			y: y.toFloat32().subarray(0, rows * outputs),
		};
		tape.backward();
		using dx = x.gradient!.take()!;
		return { ...result, dx: dx.toFloat32().subarray(0, rows * inputs), dw: w.mainGradient!.toFloat32() };
	}

	for (const [dtype, tolerance] of [
		["f32", 2e-6],
		["bf16", 3e-3],
	] as const) {
		test(`${dtype}, several blocks, rows past the last offset`, () => {
			const { loads, outputs, x, w, dy, y, dx, dw } = run(device, dtype);
			const inputs = x.length / 371;
			expect(relativeRms(y, reference(x, w, loads, outputs))).toBeLessThan(tolerance);
			// dx = dy W: the same product with every expert's matrix transposed.
			const transposed = new Float32Array(w.length);
			for (let g = 0; g < loads.length; g++) {
				for (let o = 0; o < outputs; o++) {
					for (let i = 0; i < inputs; i++) {
						transposed[(g * inputs + i) * outputs + o] = w[(g * outputs + o) * inputs + i]!;
					}
				}
			}
			expect(relativeRms(dx, reference(dy, transposed, loads, inputs))).toBeLessThan(tolerance);
			const offsets = offsetsOf(loads);
			const expected = new Float64Array(w.length).fill(1);
			for (let g = 0; g < loads.length; g++) {
				for (let r = offsets[g]!; r < offsets[g + 1]!; r++) {
					for (let o = 0; o < outputs; o++) {
						const d = dy[r * outputs + o]!;
						const to = (g * outputs + o) * inputs;
						for (let i = 0; i < inputs; i++) expected[to + i]! += d * x[r * inputs + i]!;
					}
				}
			}
			// The weight gradient is fp32 whatever the storage.
			expect(relativeRms(dw, expected)).toBeLessThan(2e-6);
		});

		test(`${dtype}, 1 and 2 threads agree bit for bit`, () => {
			expect(run(single, dtype)).toEqual(run(device, dtype));
		});
	}

	test("refuses rows that do not fit the weight", () => {
		using offsets = Tensor.zeros(device, [3], "i32");
		using x = Tensor.zeros(device, [2, 4]);
		using w = new Parameter("experts.linear_fc1", Tensor.zeros(device, [2, 3, 5]), null);
		const tape = new Tape(device, { recording: false });
		expect(() => groupedLinear(tape, x, w, offsets)).toThrow("experts.linear_fc1 of shape [2,3,5]");
	});
});
