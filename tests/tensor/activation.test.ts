import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { Activation, type ActivationName } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { type ActivationOptions, activation } from "../../src/tensor/ops/activation.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";
import { gateRows } from "./expert-reference.ts";
import { factorOf, ringMask, scaleMask } from "./ring-masks.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const sigmoid = (x: number) => 1 / (1 + Math.exp(-x));

/** erf by its Taylor series: exact to 1e-12 for the |x| < 5 of these tests. */
function erf(x: number): number {
	let term = x;
	let sum = x;
	for (let n = 1; n < 200; n++) {
		term *= (-x * x) / n;
		sum += term / (2 * n + 1);
	}
	return (2 / Math.sqrt(Math.PI)) * sum;
}

const plain: Partial<Record<ActivationName, (x: number) => number>> = {
	squaredRelu: (x) => Math.max(x, 0) ** 2,
	geluTanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
	geluErf: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
};

/** The formulas of docs/spec/moe-performance.md §1.2 in float64, a row of x at a time. */
function reference(
	kind: ActivationName,
	x: ArrayLike<number>,
	probability: ArrayLike<number> | null,
	rows: number,
	{ clamp = Number.POSITIVE_INFINITY, linearOffset = 0, interleave = 0 }: ActivationOptions = {},
): Float64Array {
	const inputs = rows === 0 ? 0 : x.length / rows;
	const act = plain[kind];
	const width = act ? inputs : inputs / 2;
	return Float64Array.from({ length: rows * width }, (_, i) => {
		const row = Math.floor(i / width);
		const p = probability ? probability[row]! : 1;
		if (act) return p * act(x[i]!);
		const [gateColumn, linearColumn] = gateRows(i % width, width, interleave);
		const gate = Math.min(x[row * inputs + gateColumn]!, clamp);
		const linear = Math.max(-clamp, Math.min(x[row * inputs + linearColumn]!, clamp));
		if (kind === "geglu") return p * plain.geluTanh!(gate) * linear;
		if (kind === "swiglu") return p * gate * sigmoid(gate) * linear;
		return p * gate * sigmoid(1.702 * gate) * (linear + linearOffset);
	});
}

const cases: [ActivationName, ActivationOptions][] = [
	["squaredRelu", {}],
	["swiglu", {}],
	["swiglu", { clamp: 1.5 }],
	["quickGeglu", {}],
	["quickGeglu", { linearOffset: 1 }],
	["quickGeglu", { clamp: 1.5, linearOffset: 1 }],
	["swiglu", { interleave: 1 }],
	["quickGeglu", { clamp: 1.5, linearOffset: 1, interleave: 1 }],
	["geglu", {}],
	["geglu", { clamp: 1.5 }],
	["geluTanh", {}],
	["geluErf", {}],
];

describe("activation", () => {
	for (const [kind, options] of cases) {
		const name = `${kind} ${JSON.stringify(options)}`;
		for (const [rows, width] of [
			[5, 19],
			[67, 4],
			[0, 8],
		] as const) {
			const inputs = plain[kind] ? width : 2 * width;
			const x = { values: randomValues(rows * inputs, 1, 3), shape: [rows, inputs] };
			test(`${name}, [${rows}, ${width}]`, () => {
				checkGradients(device, {
					inputs: { x },
					forward: (tape, { x }) => activation(tape, x!, kind, options),
					reference: ({ x }) => reference(kind, x!, null, rows, options),
				});
			});
			test(`${name}, [${rows}, ${width}] with row probabilities`, () => {
				checkGradients(device, {
					inputs: { x, p: { values: randomValues(rows, 2), shape: [rows] } },
					forward: (tape, { x, p }) => activation(tape, x!, kind, { ...options, rowProbability: p! }),
					reference: ({ x, p }) => reference(kind, x!, p!, rows, options),
				});
			});
		}

		test(`${name} of masked columns`, () => {
			const [rows, width] = [65, 3];
			const inputs = plain[kind] ? width : 2 * width;
			const rings = Array.from({ length: inputs }, (_, column) => ((column * 3) % 4) - 1);
			checkGradients(device, {
				inputs: {
					x: { values: randomValues(rows * inputs, 1, 3), shape: [rows, inputs] },
					p: { values: randomValues(rows, 2), shape: [rows] },
					m: { values: Float32Array.of(0.9, 0.4, 0.1), shape: [3] },
					s: { values: Float32Array.of(0.8), shape: [1] },
				},
				forward: (tape, { x, p, m, s }) => {
					const mask = { columns: ringMask(tape, m!, rings), scale: scaleMask(tape, s!, inputs) };
					return activation(tape, x!, kind, { ...options, rowProbability: p!, mask });
				},
				reference: ({ x, p, m, s }) => {
					const masked = x!.map((value, at) => s![0]! * factorOf(rings, m!, at % inputs) * value);
					return reference(kind, masked, p!, rows, options);
				},
			});
		});

		test(`${name} rounds bf16 storage once`, () => {
			const inputs = plain[kind] ? 33 : 66;
			using x = Tensor.from(device, randomValues(4 * inputs, 3, 3), [4, inputs], { dtype: "bf16" });
			using p = Tensor.from(device, randomValues(4, 4));
			using y = activation(new Tape(device, { recording: false }), x, kind, { ...options, rowProbability: p });
			expect(y.dtype).toBe("bf16");
			const expected = reference(kind, x.toFloat32(), p.toFloat32(), 4, options);
			for (const [i, value] of y.toFloat32().entries()) {
				expect(Math.abs(value - expected[i]!)).toBeLessThanOrEqual(Math.abs(expected[i]!) * 2 ** -8 + 1e-6);
			}
		});
	}

	test("values of the specification's formulas", () => {
		const value = (kind: ActivationName, x: number[], options: ActivationOptions = {}) => {
			using input = Tensor.from(device, Float32Array.from(x), [1, x.length]);
			using y = activation(new Tape(device, { recording: false }), input, kind, options);
			return y.item();
		};
		expect(value("squaredRelu", [1.5])).toBe(2.25);
		expect(value("squaredRelu", [-1.5])).toBe(0);
		expect(value("swiglu", [2, 3])).toBeCloseTo(6 * sigmoid(2), 6);
		expect(value("quickGeglu", [2, 3])).toBeCloseTo(6 * sigmoid(3.404), 6);
		expect(value("quickGeglu", [10, -9], { clamp: 7, linearOffset: 1 })).toBeCloseTo(-42 * sigmoid(11.914), 4);
		// The gate has no lower bound.
		expect(value("swiglu", [-10, 2], { clamp: 7 })).toBeCloseTo(-20 * sigmoid(-10), 7);
		expect(value("geluTanh", [1])).toBeCloseTo(0.8411919906, 6);
		expect(value("geluErf", [1])).toBeCloseTo(0.8413447461, 6);
		expect(value("geluErf", [-3])).toBeCloseTo(-0.0040496941, 6);
	});

	test("far from zero the gate is open or shut", () => {
		for (const kind of ["swiglu", "quickGeglu"] as const) {
			using x = Tensor.from(device, Float32Array.of(200, -200, 3e38, -3e38, 1, 1, 1, 1), [1, 8]);
			using y = activation(new Tape(device, { recording: false }), x, kind);
			const [open, shut, ...largest] = y.toFloat32();
			expect([open, ...largest]).toEqual([200, Math.fround(3e38), expect.any(Number)]);
			expect(Math.abs(shut!)).toBeLessThan(1e-35);
			expect(Math.abs(largest[1]!)).toBeLessThan(1.5);
		}
	});

	test("clamps count as inside at the limit, and stop the gradient beyond it", () => {
		using plainX = Tensor.from(device, Float32Array.of(7, 8, 1, 1, 1, 1, 7, -7, 8, -8), [1, 10]);
		using x = plainX.withGradient(new GradientSlot(device, [1, 10], "f32"));
		const tape = new Tape(device, { recording: true });
		using y = activation(tape, x, "quickGeglu", { clamp: 7, linearOffset: 1 });
		y.gradient!.accumulate(Tensor.from(device, new Float32Array(5).fill(1), [1, 5]));
		tape.backward();
		using gradient = x.gradient!.take()!;
		const [atLimit, beyond] = gradient.toFloat32();
		const linear = gradient.toFloat32().subarray(5);
		expect(atLimit).not.toBe(0);
		expect(beyond).toBe(0);
		expect([...linear].map((value) => value !== 0)).toEqual([true, true, true, false, false]);
	});

	test("rows beyond the row count are neither read nor written", () => {
		const [rows, width, live] = [70, 6, 66];
		const values = randomValues(rows * width, 5).fill(Number.NaN, live * width);
		using rowCount = Tensor.from(device, Int32Array.of(live));
		using x = Tensor.from(device, values, [rows, width]);
		using y = Tensor.from(device, new Float32Array(rows * width).fill(9), [rows, width]);
		using dx = Tensor.from(device, new Float32Array(rows * width).fill(9), [rows, width]);
		using drowProbability = Tensor.from(device, new Float32Array(rows).fill(9));
		const args = {
			x,
			row_probability: null,
			row_count: rowCount,
			rows,
			width,
			interleave: 0,
			clamp: 1,
			linear_offset: 0,
		};
		const kind = { kind: Activation.squaredRelu, dtype: x.dtypeCode };
		device.run("activation_forward", { ...args, ...kind, y });
		device.run("activation_backward", { ...args, ...kind, dy: x, dx, drow_probability: drowProbability });
		expect(y.toFloat32().indexOf(9)).toBe(live * width);
		expect(dx.toFloat32().indexOf(9)).toBe(live * width);
		expect(drowProbability.toFloat32().indexOf(9)).toBe(live);
		expect(y.toFloat32().some(Number.isNaN)).toBe(false);
	});

	test("passes the row count of its input on", () => {
		using rowCount = Tensor.from(device, Int32Array.of(1));
		using x = Tensor.from(device, Float32Array.of(1, 2), [2, 1]);
		using counted = x.withRowCount(rowCount);
		using y = activation(new Tape(device, { recording: false }), counted, "squaredRelu");
		expect(y.rowCount).toBe(rowCount);
	});

	test("1 and 2 threads agree bit for bit", async () => {
		using single = await testDevice(1);
		const [rows, width] = [150, 33];
		const run = (on: Device) => {
			using plainX = Tensor.from(on, randomValues(rows * 2 * width, 6, 3), [rows, 2 * width]);
			using x = plainX.withGradient(new GradientSlot(on, plainX.shape, "f32"));
			using plainP = Tensor.from(on, randomValues(rows, 7));
			using rowProbability = plainP.withGradient(new GradientSlot(on, plainP.shape, "f32"));
			const tape = new Tape(on, { recording: true });
			using y = activation(tape, x, "swiglu", { rowProbability });
			y.gradient!.accumulate(Tensor.from(on, randomValues(rows * width, 8), [rows, width]));
			tape.backward();
			using dx = x.gradient!.take()!;
			using drowProbability = rowProbability.gradient!.take()!;
			return [y, dx, drowProbability].map((tensor) => tensor.toFloat32());
		};
		expect(run(single)).toEqual(run(device));
	});

	test("a NaN stays a NaN", () => {
		for (const kind of ["squaredRelu", "swiglu", "quickGeglu", "geluTanh", "geluErf"] as const) {
			using x = Tensor.from(device, Float32Array.of(Number.NaN, 1), [1, 2]);
			using y = activation(new Tape(device, { recording: false }), x, kind, { clamp: 7 });
			expect(y.item()).toBeNaN();
		}
	});
});
