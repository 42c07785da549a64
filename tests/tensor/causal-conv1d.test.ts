import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { causalConv1d } from "../../src/tensor/ops/causal-conv1d.ts";
import { splitColumns } from "../../src/tensor/ops/columns.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** The convolution in float64: columns [start, start + channels) of rows of `stride`. */
function reference(
	x: Float64Array,
	weight: Float64Array,
	bias: Float64Array,
	lengths: readonly number[],
	window = { start: 0, stride: bias.length },
): Float64Array {
	const channels = bias.length;
	const width = weight.length / channels;
	const y = new Float64Array(lengths.reduce((sum, length) => sum + length, 0) * channels);
	let first = 0;
	for (const length of lengths) {
		for (let t = first; t < first + length; t++) {
			for (let c = 0; c < channels; c++) {
				let p = bias[c]!;
				for (let k = 0; k < width; k++) {
					const from = t - width + 1 + k;
					if (from >= first) p += weight[c * width + k]! * x[from * window.stride + window.start + c]!;
				}
				y[t * channels + c] = p / (1 + Math.exp(-p));
			}
		}
		first += length;
	}
	return y;
}

function inputs(lengths: readonly number[], channels: number, width: number) {
	const tokens = lengths.reduce((sum, length) => sum + length, 0);
	return {
		inputs: { x: { values: randomValues(tokens * channels, 1), shape: [tokens, channels] } },
		parameters: {
			weight: { values: randomValues(channels * width, 2), shape: [channels, width] },
			bias: { values: randomValues(channels, 3), shape: [channels] },
		},
	};
}

/** Output and gradients of one run in the given storage type, all values representable in bf16. */
function run(on: Device, dtype: FloatDtype): Float32Array[] {
	const [tokens, channels, width] = [300, 270, 4];
	const rounded = (count: number, seed: number) => randomValues(count, seed).map((v) => Math.round(v * 64) / 64);
	using sequences = Sequences.of(on, [1, 200, 99]);
	using plain = Tensor.from(on, rounded(tokens * channels, 1), [tokens, channels], { dtype });
	using x = plain.withGradient(new GradientSlot(on, plain.shape, dtype));
	const parameter = (name: string, shape: number[], seed: number) =>
		new Parameter(
			name,
			Tensor.from(
				on,
				rounded(
					shape.reduce((a, b) => a * b),
					seed,
				),
				shape,
				{ dtype },
			),
			Tensor.zeros(on, shape),
		);
	using weight = parameter("weight", [channels, width], 2);
	using bias = parameter("bias", [channels], 3);
	const tape = new Tape(on, { recording: true });
	using y = causalConv1d(tape, x, weight, bias, sequences);
	y.gradient!.accumulate(Tensor.from(on, rounded(tokens * channels, 4), y.shape, { dtype }));
	tape.backward();
	using dx = x.gradient!.take()!;
	return [y, dx, weight.mainGradient!, bias.mainGradient!].map((tensor) => tensor.toFloat32());
}

describe("causalConv1d", () => {
	for (const [lengths, channels, width] of [
		[[7], 5, 4],
		[[5, 0, 1, 2, 3, 4, 0], 3, 4],
		[[2, 9], 2, 1],
		[[3, 8], 3, 3],
		[[6, 1], 2, 7],
		[[127, 140], 1, 4],
		[[3], 259, 4],
		[[], 4, 4],
		[[0, 0], 4, 4],
	] as const) {
		test(`sequences of [${lengths}] tokens, ${channels} channels, width ${width}`, () => {
			using sequences = Sequences.of(device, lengths);
			checkGradients(device, {
				...inputs(lengths, channels, width),
				forward: (tape, { x }, { weight, bias }) => causalConv1d(tape, x!, weight!, bias!, sequences),
				reference: ({ x, weight, bias }) => reference(x!, weight!, bias!, lengths),
			});
		});
	}

	test("without a bias: it is 0", () => {
		const lengths = [20, 6];
		using sequences = Sequences.of(device, lengths);
		const { inputs: x, parameters } = inputs(lengths, 35, 4);
		checkGradients(device, {
			inputs: x,
			parameters: { weight: parameters.weight },
			forward: (tape, { x }, { weight }) => causalConv1d(tape, x!, weight!, null, sequences),
			reference: ({ x, weight }) => reference(x!, weight!, new Float64Array(35), lengths),
		});
	});

	test("reads and writes a window of columns", () => {
		const lengths = [4, 6];
		using sequences = Sequences.of(device, lengths);
		checkGradients(device, {
			...inputs(lengths, 3, 4),
			inputs: { x: { values: randomValues(10 * 8, 1), shape: [10, 8] } },
			forward: (tape, { x }, { weight, bias }) => {
				const [left, middle, right] = splitColumns(tape, x!, [2, 3, 3]);
				using before = left!;
				using window = middle!;
				using after = right!;
				expect([before.width, after.width]).toEqual([2, 3]);
				return causalConv1d(tape, window, weight!, bias!, sequences);
			},
			reference: ({ x, weight, bias }) => reference(x!, weight!, bias!, lengths, { start: 2, stride: 8 }),
		});
	});

	test("bf16 storage gives the fp32 result, rounded", () => {
		const [wide, narrow] = [run(device, "f32"), run(device, "bf16")];
		expect(relativeRms(narrow[0]!, wide[0]!)).toBeLessThan(2 ** -8);
		expect(relativeRms(narrow[1]!, wide[1]!)).toBeLessThan(2 ** -8);
		// No value is rounded on the way to the weight gradients; a GPU sums rows of other types in another order.
		const limit = device.library.kind === "cpu" ? 0 : 1e-6;
		expect(relativeRms(narrow[2]!, wide[2]!)).toBeLessThanOrEqual(limit);
		expect(relativeRms(narrow[3]!, wide[3]!)).toBeLessThanOrEqual(limit);
	});

	test("one thread and two give the same bits", async () => {
		using single = await testDevice(1);
		expect(run(single, "f32")).toEqual(run(device, "f32"));
	});

	// Those loops keep the last tokens in registers from piece to piece, which are cut at every 16th and every 128th token.
	test("loops over vectors of channels give what the loops over few channels give", () => {
		const [lengths, channels, few, width] = [[126, 1, 2, 127, 0, 145, 3], 32, 4, 4];
		const tokens = lengths.reduce((sum, length) => sum + length, 0);
		using sequences = Sequences.of(device, lengths);
		const [x, dy] = [randomValues(tokens * channels, 1), randomValues(tokens * channels, 2)];
		const [taps, biases] = [randomValues(channels * width, 3), randomValues(channels, 4)];
		/** Columns [from, from + count) of rows. */
		const columns = (values: Float32Array, from: number, count: number) =>
			values.filter((_, i) => i % channels >= from && i % channels < from + count);
		const pass = (from: number, count: number) => {
			using plain = Tensor.from(device, columns(x, from, count), [tokens, count]);
			using input = plain.withGradient(new GradientSlot(device, plain.shape, "f32"));
			const parameter = (name: string, values: Float32Array, shape: number[]) =>
				new Parameter(name, Tensor.from(device, values, shape), Tensor.zeros(device, shape));
			using weight = parameter("weight", taps.subarray(from * width, (from + count) * width), [count, width]);
			using bias = parameter("bias", biases.subarray(from, from + count), [count]);
			const tape = new Tape(device, { recording: true });
			using y = causalConv1d(tape, input, weight, bias, sequences);
			y.gradient!.accumulate(Tensor.from(device, columns(dy, from, count), y.shape));
			tape.backward();
			using dx = input.gradient!.take()!;
			return {
				y: y.toFloat32(),
				dx: dx.toFloat32(),
				dweight: weight.mainGradient!.toFloat32(),
				dbias: bias.mainGradient!.toFloat32(),
			};
		};
		const all = pass(0, channels);
		for (let from = 0; from < channels; from += few) {
			const own = pass(from, few);
			expect(relativeRms(columns(all.y, from, few), own.y)).toBeLessThan(5e-7);
			expect(relativeRms(columns(all.dx, from, few), own.dx)).toBeLessThan(5e-7);
			expect(relativeRms(all.dweight.subarray(from * width, (from + few) * width), own.dweight)).toBeLessThan(2e-6);
			expect(relativeRms(all.dbias.subarray(from, from + few), own.dbias)).toBeLessThan(2e-6);
		}
	});

	test("refuses shapes that do not fit", () => {
		const tape = new Tape(device, { recording: false });
		using sequences = Sequences.of(device, [2]);
		using x = Tensor.zeros(device, [2, 3]);
		using weight = new Parameter("w", Tensor.zeros(device, [2, 4]), null);
		using bias = new Parameter("b", Tensor.zeros(device, [3]), null);
		expect(() => causalConv1d(tape, x, weight, bias, sequences)).toThrow(
			"A convolution of 3 channels cannot take w [2,4] and b [3].",
		);
		using right = new Parameter("w", Tensor.zeros(device, [3, 4]), null);
		using longer = Sequences.of(device, [3]);
		expect(() => causalConv1d(tape, x, right, bias, longer)).toThrow("Sequences of 3 tokens do not describe 2 rows.");
	});
});
