/** An adapter's operation: values, gradients of trainable parameters, and the tensors that frozen projections keep. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { groupedLinear } from "../../src/tensor/ops/grouped-linear.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { addGroupedLowRank, addLowRank, addScaledProduct } from "../../src/tensor/ops/low-rank.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** x wᵀ of matrices in float64, row-major. */
function product(x: ArrayLike<number>, w: ArrayLike<number>, inputs: number): Float64Array {
	const outputs = w.length / inputs;
	return Float64Array.from({ length: (x.length / inputs) * outputs }, (_, at) => {
		const [row, output] = [Math.floor(at / outputs), at % outputs];
		let sum = 0;
		for (let i = 0; i < inputs; i++) sum += x[row * inputs + i]! * w[output * inputs + i]!;
		return sum;
	});
}

const [rows, inputs, outputs, rank, scale] = [9, 7, 6, 3, 1.75];
const values = {
	x: { values: randomValues(rows * inputs, 1), shape: [rows, inputs] },
	weight: { values: randomValues(outputs * inputs, 2), shape: [outputs, inputs] },
	a: { values: randomValues(rank * inputs, 3), shape: [rank, inputs] },
	b: { values: randomValues(outputs * rank, 4), shape: [outputs, rank] },
};

describe("low rank", () => {
	test("gradients of x, the weight and both matrices", () => {
		const { x, ...parameters } = values;
		checkGradients(device, {
			inputs: { x },
			parameters,
			forward: (tape, { x }, { weight, a, b }) =>
				addLowRank(tape, linear(tape, x!, weight!), x!, { a: a!, b: b!, scale }),
			reference: ({ x, weight, a, b }) => {
				const added = product(product(x!, a!, inputs), b!, rank);
				return product(x!, weight!, inputs).map((value, i) => value + scale * added[i]!);
			},
		});
	});

	test("gradients through the second product alone, into the first one's output and a base of its own", () => {
		const h = { values: randomValues(rows * rank, 5), shape: [rows, rank] };
		checkGradients(device, {
			inputs: { x: values.x, h },
			parameters: { weight: values.weight, b: values.b },
			forward: (tape, { x, h }, { weight, b }) =>
				addScaledProduct(tape, linear(tape, x!, weight!), h!, { b: b!, scale }),
			reference: ({ x, h, weight, b }) => {
				const added = product(h!, b!, rank);
				return product(x!, weight!, inputs).map((value, i) => value + scale * added[i]!);
			},
		});
	});

	test("the same by expert, one of them without rows", () => {
		const counts = [4, 0, 5];
		const experts = counts.length;
		const starts = counts.map((_, g) => counts.slice(0, g).reduce((sum, count) => sum + count, 0));
		const stacked = (shape: number[], seed: number) => ({
			values: randomValues(experts * shape[0]! * shape[1]!, seed),
			shape: [experts, ...shape],
		});
		using offsets = Tensor.from(device, Int32Array.of(...starts, rows));
		checkGradients(device, {
			inputs: { x: values.x },
			parameters: {
				weight: stacked([outputs, inputs], 2),
				a: stacked([rank, inputs], 3),
				b: stacked([outputs, rank], 4),
			},
			forward: (tape, { x }, { weight, a, b }) =>
				addGroupedLowRank(tape, groupedLinear(tape, x!, weight!, offsets), x!, { a: a!, b: b!, scale }, offsets),
			reference: ({ x, weight, a, b }) => {
				const of = (w: Float64Array, g: number) => w.subarray((g * w.length) / experts, ((g + 1) * w.length) / experts);
				const parts = counts.map((count, g) => {
					const own = x!.subarray(starts[g]! * inputs, (starts[g]! + count) * inputs);
					const added = product(product(own, of(a!, g), inputs), of(b!, g), rank);
					return product(own, of(weight!, g), inputs).map((value, i) => value + scale * added[i]!);
				});
				return Float64Array.from(parts.flatMap((part) => [...part]));
			},
		});
	});

	/** Runs projection and adapter, the weight frozen, x with or without a gradient. */
	function run(options: { xWants: boolean; late: boolean; dtype?: "f32" | "bf16" }) {
		const { dtype = "f32" } = options;
		const made = (name: keyof typeof values, trains: boolean) => {
			const { values: own, shape } = values[name];
			return new Parameter(
				name,
				Tensor.from(device, own, shape, { dtype }),
				trains ? Tensor.zeros(device, shape) : null,
			);
		};
		using weight = made("weight", false);
		using a = made("a", true);
		using b = made("b", true);
		using plain = Tensor.from(device, values.x.values, values.x.shape, { dtype });
		using x = plain.withGradient(options.xWants ? new GradientSlot(device, plain.shape, dtype) : null);
		const ready: string[] = [];
		const tape = new Tape(device, { recording: true, onGradient: ({ name }) => ready.push(name) });
		using y = addLowRank(tape, linear(tape, x, weight), x, { a, b, scale });
		const output = y.toFloat32();
		y.gradient!.accumulate(Tensor.from(device, randomValues(rows * outputs, 5), y.shape, { dtype }));
		tape.backward(options.late ? "late" : "immediate");
		const early = [...ready];
		tape.drain();
		using dx = x.gradient?.take();
		return {
			output,
			early,
			ready,
			a: a.mainGradient!.toFloat32(),
			b: b.mainGradient!.toFloat32(),
			x: dx?.toFloat32() ?? null,
		};
	}

	test("late gradients of both matrices are the immediate ones, and are ready once", () => {
		const before = device.memoryStatistics().liveBytes;
		const [now, late] = [run({ xWants: true, late: false }), run({ xWants: true, late: true })];
		expect([now.early.sort(), late.early]).toEqual([["a", "b"], []]);
		expect(late.ready.sort()).toEqual(["a", "b"]);
		expect([late.a, late.b, late.x]).toEqual([now.a, now.b, now.x]);
		expect(device.memoryStatistics().liveBytes).toBe(before);
	});

	test("trains where nothing before it does", () => {
		const [alone, both] = [run({ xWants: false, late: false }), run({ xWants: true, late: false })];
		expect(alone.x).toBeNull();
		expect([alone.output, alone.a, alone.b]).toEqual([both.output, both.a, both.b]);
	});

	test("in bf16 as in fp32 but for rounding", () => {
		const [narrow, wide] = [run({ xWants: true, late: false, dtype: "bf16" }), run({ xWants: true, late: false })];
		for (const what of ["output", "a", "b", "x"] as const) {
			expect(relativeRms(narrow[what]!, wide[what]!)).toBeLessThan(1e-2);
		}
	});

	test("a frozen projection keeps nothing of what enters", () => {
		const { shape } = values.weight;
		using weight = new Parameter("weight", Tensor.from(device, values.weight.values, shape), null);
		using plain = Tensor.from(device, values.x.values, values.x.shape);
		const x = plain.withGradient(new GradientSlot(device, plain.shape, "f32"));
		const tape = new Tape(device, { recording: true });
		const { references } = plain.allocation;
		using y = linear(tape, x, weight);
		expect(plain.allocation.references).toBe(references);
		y.gradient!.accumulate(Tensor.zeros(device, y.shape));
		tape.backward();
		x.gradient!.clear();
		x[Symbol.dispose]();
	});
});
