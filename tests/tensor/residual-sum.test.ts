/** Sums that norms write: the gradients, and the bits of sums written apart. */
import { describe, expect, spyOn, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { add, addLater } from "../../src/tensor/ops/add.ts";
import { layerNorm } from "../../src/tensor/ops/layer-norm.ts";
import { addMaskedColumnsLater } from "../../src/tensor/ops/mask-columns.ts";
import { rmsNorm } from "../../src/tensor/ops/rms-norm.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Recomputed } from "../../src/tensor/recompute.ts";
import { ResidualSum } from "../../src/tensor/residual-sum.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues } from "../support.ts";
import { openDeviceWithoutLeaks } from "./devices.ts";
import { factorOf, ringMask, scaleMask } from "./ring-masks.ts";

let device: Device;
openDeviceWithoutLeaks((opened) => {
	device = opened;
});

/** How to make y of a sum, in groups of columns; the masks are of factors m and scales s where there are any. */
interface Norm {
	readonly name: string;
	readonly masked?: boolean;
	readonly groups?: number;
}
const norms: readonly Norm[] = [
	{ name: "rmsNorm" },
	{ name: "rmsNorm", groups: 2 },
	{ name: "rmsNorm", masked: true },
	{ name: "layerNorm" },
	{ name: "layerNorm", masked: true },
];

interface Operands {
	readonly a: Tensor;
	readonly b: Tensor;
	/** Factors of three rings of columns, and of a whole branch; each with a gradient. */
	readonly m: Tensor;
	readonly s: Tensor;
	readonly weight: Parameter;
	readonly bias: Parameter;
}

const ringsOf = (width: number) => Array.from({ length: width }, (_, column) => (column % 4) - 1);

/** The norm of a + b, or of a + s m b, and the sum; `apart`: the sum is written before. */
function normOfSum(tape: Tape, norm: Norm, { a, b, m, s, weight, bias }: Operands, apart: boolean) {
	const { width } = a;
	const mask = norm.masked ? { columns: ringMask(tape, m, ringsOf(width)), scale: scaleMask(tape, s, width) } : null;
	using sum = mask ? addMaskedColumnsLater(tape, a, b, mask) : addLater(tape, a, b);
	if (apart) sum.written();
	const of = norm.name === "rmsNorm" ? { groupSize: width / (norm.groups ?? 1), mask: mask && ringed(mask) } : {};
	const y =
		norm.name === "rmsNorm"
			? rmsNorm(tape, sum.tensor, weight, 1e-2, { ...of, sum })
			: layerNorm(tape, sum.tensor, weight, bias, 1e-2, { sum });
	return { y, sum: sum.tensor.share() };
}

/** The columns' factors alone. */
const ringed = <Columns>({ columns }: { readonly columns: Columns }) => ({ columns, scale: null });

/** The norm's output plus the sum before it, in float64. */
function reference(norm: Norm, width: number, values: Record<string, Float64Array>): Float64Array {
	const { a, b, m, s, weight, bias } = values as Record<"a" | "b" | "m" | "s" | "weight" | "bias", Float64Array>;
	const rings = ringsOf(width);
	const factor = (at: number) => (norm.masked ? factorOf(rings, m, at % width) : 1);
	const sum = a.map((value, at) => value + (norm.masked ? s[0]! : 1) * factor(at) * b[at]!);
	const size = width / (norm.groups ?? 1);
	return sum.map((total, at) => {
		const group = Array.from({ length: size }, (_, i) => at - (at % size) + i);
		const average = (of: (at: number) => number) => group.reduce((all, i) => all + of(i), 0) / size;
		if (norm.name === "rmsNorm") {
			const h = (i: number) => factor(i) * sum[i]!;
			return (h(at) / Math.sqrt(average((i) => h(i) ** 2) + 1e-2)) * weight[at % width]! + total;
		}
		const mean = average((i) => sum[i]!);
		const variance = average((i) => (sum[i]! - mean) ** 2);
		return ((total - mean) / Math.sqrt(variance + 1e-2)) * weight[at % width]! + bias[at % width]! + total;
	});
}

const named = ({ name, masked, groups }: Norm) =>
	`${name}${masked ? " of a masked sum" : ""}${groups ? ` in ${groups} groups` : ""}`;

for (const norm of norms) {
	describe(named(norm), () => {
		for (const [rows, width] of [
			[5, 24],
			[66, 6],
			[0, 16],
		] as const) {
			test(`gradients, [${rows}, ${width}]`, () => {
				checkGradients(device, {
					inputs: {
						a: { values: randomValues(rows * width, 1), shape: [rows, width] },
						b: { values: randomValues(rows * width, 2), shape: [rows, width] },
						m: { values: Float32Array.of(0.9, 0.4, 0.1), shape: [3] },
						s: { values: Float32Array.of(0.8), shape: [1] },
					},
					parameters: {
						weight: { values: randomValues(width, 3), shape: [width] },
						bias: { values: randomValues(width, 4), shape: [width] },
					},
					forward: (tape, { a, b, m, s }, { weight, bias }) => {
						const operands = { a: a!, b: b!, m: m!, s: s!, weight: weight!, bias: bias! };
						const { y, sum } = normOfSum(tape, norm, operands, false);
						using normed = y;
						using total = sum;
						return add(tape, normed, total);
					},
					reference: (values) => reference(norm, width, values),
				});
			});
		}

		for (const dtype of ["f32", "bf16"] as const) {
			for (const [rows, width] of [
				[40, 2688],
				[7, 34],
			] as const) {
				test(`the bits of a sum written apart, ${dtype} [${rows}, ${width}]`, () => {
					expect(bits(norm, rows, width, dtype, false)).toEqual(bits(norm, rows, width, dtype, true));
				});
			}
		}
	});
}

/** The sum, its norm and all gradients, and which operations ran forward. */
function bits(norm: Norm, rows: number, width: number, dtype: FloatDtype, apart: boolean) {
	using stack = new DisposableStack();
	const leaf = (values: Float32Array, shape: readonly number[], of: FloatDtype) => {
		using plain = Tensor.from(device, values, shape, { dtype: of });
		return stack.use(plain.withGradient(new GradientSlot(device, shape, of)));
	};
	const parameter = (name: string, seed: number) =>
		stack.use(
			new Parameter(
				name,
				Tensor.from(device, randomValues(width, seed), [width], { dtype }),
				Tensor.zeros(device, [width]),
			),
		);
	const [a, b] = [
		leaf(randomValues(rows * width, 1), [rows, width], dtype),
		leaf(randomValues(rows * width, 2), [rows, width], dtype),
	];
	const [m, s] = [leaf(Float32Array.of(0.9, 0.4, 0.1), [3], "f32"), leaf(Float32Array.of(0.8), [1], "f32")];
	const [weight, bias] = [parameter("weight", 3), parameter("bias", 4)];
	const tape = new Tape(device, { recording: true });
	const { y, sum } = normOfSum(tape, norm, { a, b, m, s, weight, bias }, apart);
	stack.use(y);
	stack.use(sum);
	y.gradient!.accumulate(Tensor.from(device, randomValues(rows * width, 5), [rows, width], { dtype }));
	sum.gradient!.accumulate(Tensor.from(device, randomValues(rows * width, 6), [rows, width], { dtype }));
	tape.backward();
	const gradients = [a, b, m, s].map((tensor) => {
		using gradient = tensor.gradient!.take();
		return gradient?.toFloat32() ?? null;
	});
	return [
		y.toFloat32(),
		sum.toFloat32(),
		...gradients,
		weight.mainGradient!.toFloat32(),
		bias.mainGradient!.toFloat32(),
	];
}

/** Names of the operations that `run` calls. */
function operationsOf(run: () => void): string[] {
	const spy = spyOn(device, "run");
	try {
		run();
		return spy.mock.calls.map(([name]) => name);
	} finally {
		spy.mockRestore();
	}
}

describe("a sum", () => {
	const [rows, width] = [3, 8];
	const open = () => {
		const stack = new DisposableStack();
		const some = (seed: number) => stack.use(Tensor.from(device, randomValues(rows * width, seed), [rows, width]));
		const weight = stack.use(
			new Parameter("w", Tensor.from(device, randomValues(width, 3)), Tensor.zeros(device, [width])),
		);
		return {
			a: some(1),
			b: some(2),
			weight,
			tape: new Tape(device, { recording: false }),
			[Symbol.dispose]: () => stack.dispose(),
		};
	};

	test("is written by the norm alone, once", () => {
		using x = open();
		using sum = addLater(x.tape, x.a, x.b);
		const names = operationsOf(() => {
			using y = rmsNorm(x.tape, sum.tensor, x.weight, 1e-5, { sum });
			using again = rmsNorm(x.tape, sum.written(), x.weight, 1e-5, { sum });
			expect(again.toFloat32()).toEqual(y.toFloat32());
		});
		expect(names).toEqual(["rms_norm_forward", "rms_norm_forward"]);
	});

	test("keeps its addends until it is written, and lets go of them when nothing reads it", () => {
		using x = open();
		const unread = addLater(x.tape, x.a, x.b);
		unread[Symbol.dispose]();
		const shared = x.a.share();
		const sum = addLater(x.tape, shared, x.b);
		shared[Symbol.dispose]();
		const expected = x.a.toFloat32().map((value, at) => Math.fround(value + x.b.toFloat32()[at]!));
		expect(sum.written().toFloat32()).toEqual(expected);
		sum[Symbol.dispose]();
		using there = ResidualSum.of(x.a);
		expect(there.takeAddends()).toBeNull();
		expect(there.written().toFloat32()).toEqual(x.a.toFloat32());
	});

	test("is read, not written, where its norm is computed again", () => {
		using x = open();
		const tape = new Tape(device, { recording: true });
		using a = x.a.withGradient(new GradientSlot(device, x.a.shape, "f32"));
		using sum = addLater(tape, a, x.b);
		const kinds: boolean[] = [];
		const compute = (on: Tape, value: Tensor) => {
			kinds.push(on.replaying);
			return rmsNorm(on, value, x.weight, 1e-5, { sum });
		};
		using y = new Recomputed(tape, [sum.tensor], compute);
		y.y.gradient!.accumulate(Tensor.from(device, randomValues(rows * width, 4), [rows, width]));
		expect(operationsOf(() => tape.backward())).not.toContain("add");
		expect(kinds).toEqual([false, true]);
		using gradient = a.gradient!.take()!;
		expect(gradient.toFloat32().every((value) => value !== 0)).toBe(true);
	});
});
