/** Experts whose operands are rounded to e4m3 in blocks (docs/spec/moe-performance.md §1.7). */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { E4m3Rows } from "../../src/tensor/ops/e4m3.ts";
import { addGroupedWeightGradient } from "../../src/tensor/ops/grouped-linear.ts";
import { groupedMlp } from "../../src/tensor/ops/grouped-mlp.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape, type TapeOptions } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { bytesOf, randomValues, relativeRms, testDevice } from "../support.ts";
import { codes, rounded, toE4m3 } from "./e4m3-reference.ts";
import { offsetsOf } from "./expert-reference.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const rows = (values: ArrayLike<number>, width: number) => rounded(values, width, 1);
/** Matrices of every expert on their own. */
function matrices(values: Float32Array, experts: number, width: number): Float64Array {
	const size = values.length / experts;
	return Float64Array.from(
		Array.from({ length: experts }, (_, g) => [
			...rounded(values.subarray(g * size, (g + 1) * size), width, 128),
		]).flat(),
	);
}

function run(
	recipe: "plain" | "e4m3Blockwise",
	loads: readonly number[],
	hidden: number,
	width: number,
	x: Float32Array,
	weightGradientRecipe: "plain" | "e4m3Blockwise" = "plain",
) {
	const total = loads.reduce((sum, load) => sum + load, 0);
	const experts = loads.length;
	// Every block of a matrix has another power of two.
	const matrix = (outputs: number, inputs: number, seed: number) =>
		randomValues(experts * outputs * inputs, seed, 0.1).map((value, i) => {
			const [row, column] = [Math.floor(i / inputs) % outputs, i % inputs];
			return value * 4 ** (Math.floor(column / 128) - 2 * Math.floor(row / 128));
		});
	const weights = { w1: matrix(width, hidden, 2), w2: matrix(hidden, width, 3) };
	const parameter = (name: "w1" | "w2", shape: number[]) =>
		new Parameter(name, Tensor.from(device, weights[name], shape), Tensor.zeros(device, shape));
	using fc1 = parameter("w1", [experts, width, hidden]);
	using fc2 = parameter("w2", [experts, hidden, width]);
	using offsets = Tensor.from(device, offsetsOf(loads));
	using plainX = Tensor.from(device, x, [total, hidden]);
	using input = plainX.withGradient(new GradientSlot(device, plainX.shape, "f32"));
	using plainP = Tensor.from(device, new Float32Array(total).fill(0.5));
	using p = plainP.withGradient(new GradientSlot(device, plainP.shape, "f32"));
	const tape = new Tape(device, { recording: true });
	const sorted = { rows: input, rowProbability: p, offsets };
	const options = { activation: "squaredRelu", recipe, weightGradientRecipe } as const;
	using y = groupedMlp(tape, sorted, { fc1, fc2, fc1Bias: null, fc2Bias: null }, options);
	const dy = randomValues(total * hidden, 4);
	y.gradient!.accumulate(Tensor.from(device, dy, y.shape));
	tape.backward();
	using dx = input.gradient!.take()!;
	using dp = p.gradient!.take()!;
	const gradients = { dw1: fc1.mainGradient!.toFloat32(), dw2: fc2.mainGradient!.toFloat32() };
	return { ...weights, y: y.toFloat32(), dy, dx: dx.toFloat32(), dp: dp.toFloat32(), ...gradients };
}

test("the numbers of e4m3", () => {
	expect([codes.at(-1), codes[8], codes[1]]).toEqual([448, 2 ** -6, 2 ** -9]);
	expect([17, 18, 19, 21, 1000, -17, 2 ** -10, 3 * 2 ** -10].map(toE4m3)).toEqual([
		16,
		18,
		20,
		20,
		448,
		-16,
		0,
		2 ** -8,
	]);
});

test("forward and backward are those of rounded operands, and far from those of plain ones", () => {
	const [loads, hidden, width] = [[3, 0, 5], 150, 130];
	// Rows of very different sizes, and one of zeros.
	const x = randomValues(8 * hidden, 1).map((value, i) => value * [1, 1e-4, 300, 0][Math.floor(i / hidden) % 4]!);
	const got = run("e4m3Blockwise", loads, hidden, width, x);
	const [w1, w2] = [matrices(got.w1, 3, hidden), matrices(got.w2, 3, width)];
	const expertOf = (row: number) => (row < 3 ? 0 : 2);
	/** Row t of a · the expert's matrix, [outputs, inputs] or the other way round. */
	const product = (a: ArrayLike<number>, w: Float64Array, inputs: number, outputs: number, turned: boolean) =>
		Float64Array.from({ length: 8 * outputs }, (_, i) => {
			const [t, o] = [Math.floor(i / outputs), i % outputs];
			const base = expertOf(t) * inputs * outputs;
			let sum = 0;
			for (let k = 0; k < inputs; k++)
				sum += a[t * inputs + k]! * w[base + (turned ? k * outputs + o : o * inputs + k)]!;
			return sum;
		});
	const z = product(rows(x, hidden), w1, hidden, width, false).map(Math.fround);
	const hs = z.map((value) => Math.fround(0.5 * Math.max(value, 0) ** 2));
	expect(relativeRms(got.y, product(rows(hs, width), w2, width, hidden, false))).toBeLessThan(1e-3);
	const dhs = product(rows(got.dy, hidden), w2, hidden, width, true);
	const dp = Float64Array.from({ length: 8 }, (_, t) =>
		z
			.subarray(t * width, (t + 1) * width)
			.reduce((sum, value, j) => sum + dhs[t * width + j]! * Math.max(value, 0) ** 2, 0),
	);
	expect(relativeRms(got.dp, dp)).toBeLessThan(1e-5);
	const dz = dhs.map((value, i) => Math.fround(value * Math.max(z[i]!, 0)));
	expect(relativeRms(got.dx, product(rows(dz, width), w1, width, hidden, true))).toBeLessThan(1e-3);
	// Weight gradients are of the rows as they are.
	const dw2 = Float64Array.from(got.dw2, (_, i) => {
		const [g, o, j] = [Math.floor(i / (hidden * width)), Math.floor(i / width) % hidden, i % width];
		let sum = 0;
		for (let t = 0; t < 8; t++) if (expertOf(t) === g) sum += got.dy[t * hidden + o]! * hs[t * width + j]!;
		return sum;
	});
	expect(relativeRms(got.dw2, dw2)).toBeLessThan(1e-5);
	const plain = run("plain", loads, hidden, width, x);
	expect(relativeRms(got.y, plain.y)).toBeWithin(0.02, 0.2);
	expect(relativeRms(got.dx, plain.dx)).toBeWithin(0.02, 0.2);
});

for (const dtype of ["f32", "bf16"] as const) {
	test(`weight gradients of rows, as they are or in e4m3, that are rounded in blocks of 128 of an expert, ${dtype}`, () => {
		const [loads, n, k] = [[3, 0, 300, 128], 40, 150];
		const offsets = offsetsOf(loads);
		const total = offsets.at(-1)!;
		// Rows of very different sizes; rows behind the last group are not read.
		const values = (width: number, seed: number) => {
			const sized = randomValues((total + 2) * width, seed).map(
				(value, i) => value * 10 ** ((Math.floor(i / width) % 9) - 6),
			);
			return sized.fill(Number.NaN, total * width);
		};
		// Columns of dy have powers of two of their own, which keep the digits of the small ones.
		const columnSize = (j: number) => 16 ** -(j % 5);
		const sizedColumns = values(n, 21).map((value, i) => value * columnSize(i % n));
		using dy = Tensor.from(device, sizedColumns, [total + 2, n], { dtype });
		using x = Tensor.from(device, values(k, 22), [total + 2, k], { dtype });
		const stored = { dy: dy.toFloat32(), x: x.toFloat32() };
		const columnOf = (at: number) => Math.floor(at / k) % n;
		const before = randomValues(loads.length * n * k, 23).map((value, at) => value * columnSize(columnOf(at)));
		const evened = (gradient: ArrayLike<number>) =>
			Float64Array.from(gradient, (value, at) => value / columnSize(columnOf(at)));
		using given = Tensor.from(device, offsets);
		const gradient = (recipe: "plain" | "e4m3Blockwise", accumulate: boolean, inE4m3 = false) => {
			using dw = Tensor.from(device, accumulate ? before : before.map(() => Number.NaN), [loads.length, n, k]);
			using weight = new Parameter("w", Tensor.zeros(device, dw.shape), dw.share());
			if (!accumulate) weight.forgetGradient();
			using rowCount = given.columns(loads.length, 1);
			using dyInE4m3 = inE4m3 ? E4m3Rows.of(dy, rowCount) : null;
			using xInE4m3 = inE4m3 ? E4m3Rows.of(x, rowCount) : null;
			addGroupedWeightGradient(device, dyInE4m3 ?? dy, xInE4m3 ?? x, weight, given, recipe);
			return dw.toFloat32();
		};
		const expected = (added: boolean, inE4m3: boolean) =>
			loads.flatMap((_, g) => {
				const part = (of: Float32Array, width: number) => {
					const stored = of.subarray(offsets[g]! * width, offsets[g + 1]! * width);
					return inE4m3 ? rows(stored, width) : stored;
				};
				const [left, right] = [rounded(part(stored.dy, n), n, 128, 1), rounded(part(stored.x, k), k, 128)];
				return Array.from({ length: n * k }, (_, at) => {
					const [j, i] = [Math.floor(at / k), at % k];
					let sum = added ? before[g * n * k + at]! : 0;
					for (let row = 0; row < loads[g]!; row++) sum += left[row * n + j]! * right[row * k + i]!;
					return sum;
				});
			});
		for (const [added, inE4m3] of [false, true].flatMap((added) =>
			[false, true].map((form) => [added, form] as const),
		)) {
			const got = gradient("e4m3Blockwise", added, inE4m3);
			expect(relativeRms(evened(got), evened(expected(added, inE4m3)))).toBeLessThan(1e-6);
			const [first, last] = [n * k, 2 * n * k];
			expect([...got.subarray(first, last)]).toEqual(
				added ? [...before.subarray(first, last)] : new Array(n * k).fill(0),
			);
		}
		for (const inE4m3 of [false, true]) {
			expect(relativeRms(gradient("e4m3Blockwise", false, inE4m3), gradient("plain", false))).toBeWithin(0.005, 0.1);
		}
	});
}

test("rounding for weight gradients leaves all else as it is", () => {
	const [loads, hidden, width] = [[3, 0, 5], 150, 130];
	const x = randomValues(8 * hidden, 1);
	const [kept, own] = [
		run("e4m3Blockwise", loads, hidden, width, x),
		run("e4m3Blockwise", loads, hidden, width, x, "e4m3Blockwise"),
	];
	for (const name of ["y", "dx", "dp"] as const) expect(own[name]).toEqual(kept[name]);
	for (const name of ["dw1", "dw2"] as const) expect(relativeRms(own[name], kept[name])).toBeWithin(0.005, 0.1);
});

test("a forward pass without a backward one keeps matrices in one order, recomputation in both at once", () => {
	const [experts, hidden, width] = [2, 160, 144];
	const parameter = (name: string, shape: number[]) =>
		new Parameter(name, Tensor.from(device, randomValues(experts * width * hidden, 5, 0.1), shape), null);
	using fc1 = parameter("w1", [experts, width, hidden]);
	using fc2 = parameter("w2", [experts, hidden, width]);
	using offsets = Tensor.from(device, offsetsOf([2, 3]));
	using rows = Tensor.from(device, randomValues(5 * hidden, 6), [5, hidden]);
	using rowProbability = Tensor.from(device, new Float32Array(5).fill(0.5));
	const of = (parameter: Parameter) => parameter.inE4m3({ transposed: false });
	const forward = (options: TapeOptions) => {
		const sorted = { rows, rowProbability, offsets };
		const weights = { fc1, fc2, fc1Bias: null, fc2Bias: null };
		using y = groupedMlp(new Tape(device, options), sorted, weights, {
			activation: "squaredRelu",
			recipe: "e4m3Blockwise",
		});
		return y.toFloat32();
	};
	const bytes = () => device.memoryStatistics().liveBytesByTag.parameter;
	const before = bytes();
	const evaluated = forward({ recording: false });
	const elements = experts * hidden * width;
	// Allocations are rounded up, at most to 512 bytes: two of values and two of 2 × 2 factors an expert.
	expect(bytes() - before).toBeWithin(2 * elements, 2 * elements + 4 * 512 + 1);
	expect([of(fc1).transposed, of(fc2).transposed]).toEqual([null, null]);
	const kept = bytesOf(of(fc1).values);
	expect(forward({ recording: false, training: true })).toEqual(evaluated);
	expect(bytes() - before).toBeWithin(4 * elements, 4 * elements + 6 * 512 + 1);
	expect(bytesOf(of(fc1).values)).toEqual(kept);
	const turned = bytesOf(of(fc1).transposed!);
	const [row, column] = [31, 150];
	expect(turned[column * width + row]).toBe(kept[row * hidden + column]!);
	fc1.valueChanged();
	fc2.valueChanged();
	expect(bytes()).toBe(before);
});
