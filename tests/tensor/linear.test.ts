import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { activation } from "../../src/tensor/ops/activation.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape, type WeightGradients } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** x Wᵀ + b in float64. */
function reference(x: ArrayLike<number>, weight: ArrayLike<number>, bias: ArrayLike<number> | null, inputs: number) {
	const outputs = weight.length / inputs;
	const rows = x.length / inputs;
	return Float64Array.from({ length: rows * outputs }, (_, at) => {
		const [row, output] = [Math.floor(at / outputs), at % outputs];
		let sum = bias?.[output] ?? 0;
		for (let i = 0; i < inputs; i++) sum += x[row * inputs + i]! * weight[output * inputs + i]!;
		return sum;
	});
}

describe("linear", () => {
	for (const [rows, inputs, outputs, biased] of [
		[5, 7, 3, true],
		[9, 4, 6, false],
		[1, 3, 1, true],
		[0, 4, 3, true],
	] as const) {
		test(`[${rows}, ${inputs}] → [${rows}, ${outputs}]${biased ? " with a bias" : ""}`, () => {
			const bias = { bias: { values: randomValues(outputs, 3), shape: [outputs] } };
			checkGradients(device, {
				inputs: { x: { values: randomValues(rows * inputs, 1), shape: [rows, inputs] } },
				parameters: {
					weight: { values: randomValues(outputs * inputs, 2), shape: [outputs, inputs] },
					...(biased ? bias : {}),
				},
				forward: (tape, { x }, { weight, bias }) => linear(tape, x!, weight!, bias ?? null),
				reference: ({ x, weight, bias }) => reference(x!, weight!, bias ?? null, inputs),
			});
		});
	}

	/** Runs x Wᵀ + b and its backward for dy; x is a window of a wider tensor. */
	function run(dtype: FloatDtype, outputDtype: FloatDtype, weightGradients: WeightGradients) {
		const [rows, inputs, outputs] = [33, 20, 12];
		using whole = Tensor.from(device, randomValues(rows * (inputs + 4), 1), [rows, inputs + 4], { dtype });
		using window = whole.columns(3, inputs);
		using x = window.withGradient(new GradientSlot(device, [rows, inputs], dtype));
		const parameter = (name: string, shape: number[], seed: number) =>
			new Parameter(
				name,
				Tensor.from(
					device,
					randomValues(
						shape.reduce((a, b) => a * b),
						seed,
					),
					shape,
					{ dtype },
				),
				// Gradients are added to earlier ones.
				Tensor.from(device, new Float32Array(shape.reduce((a, b) => a * b)).fill(1), shape),
			);
		using weight = parameter("weight", [outputs, inputs], 2);
		using bias = parameter("bias", [outputs], 3);
		const tape = new Tape(device, { recording: true });
		using y = linear(tape, x, weight, bias, { outputDtype });
		const dy = Tensor.from(device, randomValues(rows * outputs, 4), [rows, outputs], { dtype: outputDtype });
		const dyValues = dy.toFloat32();
		y.gradient!.accumulate(dy);
		tape.backward(weightGradients);
		using dx = x.gradient!.take()!;
		const early = weight.mainGradient!.toFloat32();
		tape.drain();
		const [xValues, weightValues] = [x.toFloat32(), weight.value.toFloat32()];
		const product = (a: (k: number) => number, b: (k: number) => number, count: number) => {
			let sum = 0;
			for (let k = 0; k < count; k++) sum += a(k) * b(k);
			return sum;
		};
		return {
			outputDtype: y.dtype,
			y: [y.toFloat32(), reference(xValues, weightValues, bias.value.toFloat32(), inputs)],
			dx: [
				dx.toFloat32(),
				Float64Array.from({ length: rows * inputs }, (_, at) => {
					const [row, input] = [Math.floor(at / inputs), at % inputs];
					return product(
						(k) => dyValues[row * outputs + k]!,
						(k) => weightValues[k * inputs + input]!,
						outputs,
					);
				}),
			],
			early,
			dweight: [
				weight.mainGradient!.toFloat32(),
				Float64Array.from({ length: outputs * inputs }, (_, at) => {
					const [output, input] = [Math.floor(at / inputs), at % inputs];
					return (
						1 +
						product(
							(k) => dyValues[k * outputs + output]!,
							(k) => xValues[k * inputs + input]!,
							rows,
						)
					);
				}),
			],
			dbias: [
				bias.mainGradient!.toFloat32(),
				Float64Array.from(
					{ length: outputs },
					(_, output) =>
						1 +
						product(
							(k) => dyValues[k * outputs + output]!,
							() => 1,
							rows,
						),
				),
			],
		} as const;
	}

	for (const [dtype, outputDtype] of [
		["f32", "f32"],
		["bf16", "bf16"],
		["bf16", "f32"],
	] as const) {
		for (const weightGradients of ["immediate", "late"] as const) {
			test(`${dtype} → ${outputDtype}, ${weightGradients} weight gradients, added to fp32`, () => {
				const before = device.memoryStatistics().liveBytes;
				const result = run(dtype, outputDtype, weightGradients);
				expect(result.outputDtype).toBe(outputDtype);
				expect(relativeRms(...result.y)).toBeLessThan(outputDtype === "bf16" ? 2.5e-3 : 1e-6);
				expect(relativeRms(...result.dx)).toBeLessThan(dtype === "bf16" ? 2.5e-3 : 1e-6);
				expect(relativeRms(...result.dweight)).toBeLessThan(1e-6);
				expect(relativeRms(...result.dbias)).toBeLessThan(1e-6);
				expect(result.early.every((value) => value === 1)).toBe(weightGradients === "late");
				expect(device.memoryStatistics().liveBytes).toBe(before);
			});
		}
	}

	test("frozen weights record no weight gradient, unwanted inputs no gradient", () => {
		using weight = new Parameter("weight", Tensor.from(device, randomValues(6, 1), [2, 3]), null);
		using x = Tensor.from(device, randomValues(3, 2), [1, 3]);
		const tape = new Tape(device, { recording: true });
		using y = linear(tape, x, weight);
		expect(y.gradient).toBeNull();
		expect(tape.segments.every((segment) => segment.entries.length === 0)).toBe(true);
	});
});

describe("two products with a GELU between them", () => {
	const gelu = (x: number) => 0.5 * x * (1 + Math.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)));

	/** fc2(GELU(fc1(x))); `apart`: the GELU is an operation of its own. */
	function twoProducts(
		tape: Tape,
		x: Tensor,
		w: Record<string, Parameter>,
		apart: boolean,
		biases: readonly (Parameter | null)[],
	): Tensor {
		if (apart) {
			using hidden = linear(tape, x, w.fc1!, biases[0]);
			using activated = activation(tape, hidden, "geluTanh");
			return linear(tape, activated, w.fc2!, biases[1]);
		}
		using activated = Tensor.empty(device, [x.rows, w.fc1!.shape[0]!], x.dtype);
		using hidden = linear(tape, x, w.fc1!, biases[0], { gelu: activated });
		return linear(tape, activated, w.fc2!, biases[1], { geluOf: hidden });
	}

	for (const [rows, inputs, width, biased] of [
		[5, 6, 9, true],
		[17, 4, 16, false],
		[0, 4, 8, true],
	] as const) {
		test(`gradients, [${rows}, ${inputs}] by ${width}${biased ? " with biases" : ""}`, () => {
			const biases = {
				b1: { values: randomValues(width, 4, 0.5), shape: [width] },
				b2: { values: randomValues(inputs, 5, 0.5), shape: [inputs] },
			};
			checkGradients(device, {
				inputs: { x: { values: randomValues(rows * inputs, 1), shape: [rows, inputs] } },
				parameters: {
					fc1: { values: randomValues(width * inputs, 2), shape: [width, inputs] },
					fc2: { values: randomValues(inputs * width, 3), shape: [inputs, width] },
					...(biased ? biases : {}),
				},
				forward: (tape, { x }, w) => twoProducts(tape, x!, w, false, [w.b1 ?? null, w.b2 ?? null]),
				reference: ({ x, fc1, fc2, b1, b2 }) => {
					const hidden = reference(x!, fc1!, b1 ?? null, inputs);
					return reference(hidden.map(gelu), fc2!, b2 ?? null, width);
				},
			});
		});
	}

	for (const dtype of ["f32", "bf16"] as const) {
		test(`on processors the bits of a GELU apart, ${dtype}`, () => {
			if (process.env.MIMO_TEST_DEVICE === "cuda") return;
			const [rows, inputs, width] = [40, 24, 72];
			const outcome = (apart: boolean) => {
				using stack = new DisposableStack();
				const parameter = (name: string, shape: number[], seed: number) => {
					const values = randomValues(
						shape.reduce((a, b) => a * b),
						seed,
					);
					const value = Tensor.from(device, values, shape, { dtype });
					return stack.use(new Parameter(name, value, Tensor.zeros(device, shape)));
				};
				const fc1 = parameter("fc1", [width, inputs], 2);
				const fc2 = parameter("fc2", [inputs, width], 3);
				const biases = [parameter("b1", [width], 4), parameter("b2", [inputs], 5)];
				using plain = Tensor.from(device, randomValues(rows * inputs, 1), [rows, inputs], { dtype });
				using x = plain.withGradient(new GradientSlot(device, plain.shape, dtype));
				const tape = new Tape(device, { recording: true });
				using y = twoProducts(tape, x, { fc1, fc2 }, apart, biases);
				y.gradient!.accumulate(Tensor.from(device, randomValues(rows * inputs, 6), [rows, inputs], { dtype }));
				tape.backward();
				using dx = x.gradient!.take()!;
				return [y, dx, ...[fc1, fc2, ...biases].map((one) => one.mainGradient!)].map((one) => one.toFloat32());
			};
			expect(outcome(false)).toEqual(outcome(true));
		});
	}

	test("tensors that do not fit are refused", () => {
		const tape = new Tape(device, { recording: false });
		using x = Tensor.zeros(device, [4, 8]);
		using w = new Parameter("w", Tensor.zeros(device, [6, 8]), null);
		using narrow = Tensor.zeros(device, [4, 5]);
		expect(() => linear(tape, x, w, null, { gelu: narrow })).toThrow("A GELU takes contiguous tensors");
	});
});
