/** Projections whose operands are rounded to e4m3 (docs/spec/moe-performance.md §1.7). */
import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { linearInE4m3 } from "../../src/tensor/ops/e4m3-linear.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { openDevices } from "./devices.ts";
import { rounded } from "./e4m3-reference.ts";

let device: Device;
openDevices((two) => {
	device = two;
});

const tokens = 5;

/** y, and the gradients of x, weight and bias, for a gradient of y. */
function run(product: typeof linearInE4m3, inputs: number, outputs: number, { bias = true, strided = false } = {}) {
	const value = (count: number, seed: number) => randomValues(count, seed, 0.5);
	const x = value(tokens * inputs, 1);
	// Every block of the matrix has another power of two.
	const w = value(outputs * inputs, 2).map(
		(each, i) => each * 4 ** (Math.floor((i % inputs) / 128) - 2 * Math.floor(i / inputs / 128)),
	);
	const b = value(outputs, 3);
	const dy = value(tokens * outputs, 4);
	const parameter = (name: string, values: Float32Array, shape: number[]) =>
		new Parameter(name, Tensor.from(device, values, shape), Tensor.zeros(device, shape));
	using weight = parameter("w", w, [outputs, inputs]);
	using offset = parameter("b", b, [outputs]);
	// Columns of a wider tensor.
	const wide = Float32Array.from({ length: tokens * (inputs + 3) }, (_, i) => {
		const column = i % (inputs + 3);
		return column < inputs ? x[Math.floor(i / (inputs + 3)) * inputs + column]! : Number.NaN;
	});
	using whole = strided ? Tensor.from(device, wide, [tokens, inputs + 3]) : Tensor.from(device, x, [tokens, inputs]);
	using columns = whole.columns(0, inputs);
	using input = columns.withGradient(new GradientSlot(device, [tokens, inputs], "f32"));
	const tape = new Tape(device, { recording: true });
	using y = product(tape, input, weight, bias ? offset : null);
	const values = y.toFloat32();
	using gradient = Tensor.from(device, dy, [tokens, outputs]);
	y.gradient!.accumulate(gradient.share());
	tape.backward();
	using dx = input.gradient!.take()!;
	return {
		...{ x, w, b, dy, y: values, dx: dx.toFloat32() },
		dw: weight.mainGradient!.toFloat32(),
		db: offset.mainGradient!.toFloat32(),
	};
}

/** a [rows, k] · b [n, k]ᵀ. */
function product(a: ArrayLike<number>, b: ArrayLike<number>, k: number): Float64Array {
	const [rows, n] = [a.length / k, b.length / k];
	return Float64Array.from({ length: rows * n }, (_, at) => {
		let sum = 0;
		for (let i = 0; i < k; i++) sum += a[Math.floor(at / n) * k + i]! * b[(at % n) * k + i]!;
		return sum;
	});
}

function turned(values: ArrayLike<number>, width: number): Float64Array {
	const rows = values.length / width;
	return Float64Array.from(values, (_, at) => values[(at % rows) * width + Math.floor(at / rows)]!);
}

describe("linearInE4m3", () => {
	for (const [inputs, outputs] of [
		[128, 256],
		[336, 80],
		[48, 400],
	] as const) {
		test(`${inputs} to ${outputs}: rounded products, and gradients of weight and bias of what is not rounded`, () => {
			const got = run(linearInE4m3, inputs, outputs);
			const weight = rounded(got.w, inputs, 128);
			const y = product(rounded(got.x, inputs, 1), weight, inputs).map((sum, at) => sum + got.b[at % outputs]!);
			expect(relativeRms(got.y, y)).toBeLessThan(1e-6);
			expect(relativeRms(got.dx, product(rounded(got.dy, outputs, 1), turned(weight, inputs), outputs))).toBeLessThan(
				1e-6,
			);
			const plain = run(linear, inputs, outputs);
			expect(got.dw).toEqual(plain.dw);
			expect(got.db).toEqual(plain.db);
			// The rounding is felt: three binary digits of every number.
			expect(relativeRms(got.y, plain.y)).toBeGreaterThan(0.01);
		});
	}

	test("the gradients where rounding changes nothing: of whole numbers up to 8", () => {
		const [inputs, outputs] = [140, 20];
		const whole = (count: number, seed: number) => randomValues(count, seed, 8).map(Math.round);
		checkGradients(device, {
			inputs: { x: { values: whole(tokens * inputs, 1), shape: [tokens, inputs] } },
			parameters: {
				weight: { values: whole(outputs * inputs, 2), shape: [outputs, inputs] },
				bias: { values: whole(outputs, 3), shape: [outputs] },
			},
			forward: (tape, { x }, { weight, bias }) => linearInE4m3(tape, x!, weight!, bias!),
			reference: ({ x, weight, bias }) => product(x!, weight!, inputs).map((sum, at) => sum + bias![at % outputs]!),
			weights: whole(tokens * outputs, 4),
		});
	});

	test("columns of a wider tensor give what contiguous rows give", () => {
		const [contiguous, strided] = [false, true].map((strided) => run(linearInE4m3, 144, 32, { strided, bias: false }));
		for (const name of ["y", "dx", "dw"] as const) expect(strided![name]).toEqual(contiguous![name]);
	});
});
