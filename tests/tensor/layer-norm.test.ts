import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { layerNorm } from "../../src/tensor/ops/layer-norm.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** LayerNorm in float64. */
function reference(x: ArrayLike<number>, weight: ArrayLike<number>, bias: ArrayLike<number>, epsilon: number) {
	const width = weight.length;
	const values = Float64Array.from(x);
	return values.map((value, i) => {
		const row = values.subarray(i - (i % width), i - (i % width) + width);
		const mean = row.reduce((a, b) => a + b, 0) / width;
		const variance = row.reduce((a, b) => a + (b - mean) ** 2, 0) / width;
		return ((value - mean) / Math.sqrt(variance + epsilon)) * weight[i % width]! + bias[i % width]!;
	});
}

describe("layerNorm", () => {
	for (const [rows, width] of [
		[5, 24],
		[3, 97],
		[130, 3],
		[1, 32],
		[0, 16],
	] as const) {
		test(`[${rows}, ${width}]`, () => {
			checkGradients(device, {
				inputs: { x: { values: randomValues(rows * width, 1), shape: [rows, width] } },
				parameters: {
					weight: { values: randomValues(width, 2), shape: [width] },
					bias: { values: randomValues(width, 3), shape: [width] },
				},
				forward: (tape, { x }, { weight, bias }) => layerNorm(tape, x!, weight!, bias!, 1e-5),
				reference: ({ x, weight, bias }) => reference(x!, weight!, bias!, 1e-5),
			});
		});
	}

	test("a large mean does not drown the variance", () => {
		const values = randomValues(2 * 50, 4).map((x) => x + 300);
		const [weight, bias] = [new Float32Array(50).fill(1), new Float32Array(50)];
		using x = Tensor.from(device, values, [2, 50]);
		using w = new Parameter("w", Tensor.from(device, weight), null);
		using b = new Parameter("b", Tensor.from(device, bias), null);
		using y = layerNorm(new Tape(device, { recording: false }), x, w, b, 1e-6);
		// The input's own rounding, 300 · 2⁻²⁴, is 6e-5 of its deviation.
		expect(relativeRms(y.toFloat32(), reference(values, weight, bias, 1e-6))).toBeLessThan(1e-4);
	});

	test("bf16: sums in fp32, one rounding; the gradient of a residual is added inside", () => {
		const [rows, width] = [4, 65];
		const narrow = (values: Float32Array, shape: number[]) => Tensor.from(device, values, shape, { dtype: "bf16" });
		using plain = narrow(randomValues(rows * width, 1, 2), [rows, width]);
		using x = plain.withGradient(new GradientSlot(device, plain.shape, "bf16"));
		using w = new Parameter("w", narrow(randomValues(width, 2), [width]), Tensor.zeros(device, [width]));
		using b = new Parameter("b", narrow(randomValues(width, 3), [width]), Tensor.zeros(device, [width]));
		const tape = new Tape(device, { recording: true });
		using y = layerNorm(tape, x, w, b, 1e-5);
		expect(
			relativeRms(y.toFloat32(), reference(x.toFloat32(), w.value.toFloat32(), b.value.toFloat32(), 1e-5)),
		).toBeLessThan(3e-3);
		const residual = randomValues(rows * width, 5);
		x.gradient!.accumulate(narrow(residual, [rows, width]));
		y.gradient!.accumulate(Tensor.zeros(device, y.shape, "bf16"));
		tape.backward();
		using dx = x.gradient!.take()!;
		using expected = narrow(residual, [rows, width]);
		expect(dx.toFloat32()).toEqual(expected.toFloat32());
	});

	test("a frozen weight with a trained bias, and the other way round", () => {
		for (const trained of ["weight", "bias"]) {
			using x = Tensor.from(device, randomValues(6, 1), [2, 3]);
			const parameter = (name: string) =>
				new Parameter(
					name,
					Tensor.from(device, randomValues(3, 2)),
					name === trained ? Tensor.zeros(device, [3]) : null,
				);
			using weight = parameter("weight");
			using bias = parameter("bias");
			const tape = new Tape(device, { recording: true });
			using y = layerNorm(tape, x, weight, bias, 1e-5);
			y.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 2, 3, 4, 5, 6), [2, 3]));
			tape.backward();
			if (trained === "bias") expect([...bias.mainGradient!.toFloat32()]).toEqual([5, 7, 9]);
			else expect(weight.mainGradient!.toFloat32().every((g) => g !== 0)).toBe(true);
		}
	});
});
