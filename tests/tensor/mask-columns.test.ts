/** Masks of columns, of a convolution's channels and of router logits against float64 (docs/spec/elastic.md §9, §10). */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { causalConv1d } from "../../src/tensor/ops/causal-conv1d.ts";
import { type ColumnMask, maskColumns, maskScores } from "../../src/tensor/ops/mask-columns.ts";
import { splitColumns } from "../../src/tensor/ops/split-columns.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** A mask whose factors are the input `values`, and whose gradient gathers where that input's does. */
function maskOf(values: Tensor, rings: Tensor | null): ColumnMask {
	const gradients = Tensor.zeros(values.device, values.shape);
	values.gradient!.accumulate(gradients);
	return { rings, values, gradients };
}

const factor = (rings: ArrayLike<number> | null, values: ArrayLike<number>, column: number) => {
	const ring = rings === null ? 0 : rings[column]!;
	return ring < 0 ? 1 : values[ring]!;
};

describe("columns", () => {
	for (const [name, rows, width, rings] of [
		["in rings", 7, 11, [0, 0, 1, 2, 2, -1, 1, 0, 2, -1, 1]],
		["in rings, many rows", 150, 16, [0, 1, 1, 1, 2, 2, 2, 2, 0, 0, -1, -1, 2, 1, 0, 2]],
		["all of one factor", 5, 6, null],
	] as const) {
		test(name, () => {
			const values = Float32Array.of(0.9, 0.4, 0.15).subarray(0, rings === null ? 1 : 3);
			using map = rings && Tensor.from(device, Int32Array.from(rings));
			checkGradients(device, {
				inputs: {
					x: { values: randomValues(rows * width, 1), shape: [rows, width] },
					values: { values, shape: [values.length] },
				},
				forward: (tape, x) => maskColumns(tape, x.x!, maskOf(x.values!, map)),
				reference: ({ x, values }) => x!.map((value, at) => value * factor(rings, values!, at % width)),
			});
		});
	}

	test("of a window, and of the live rows alone", () => {
		using whole = Tensor.from(device, randomValues(6 * 8, 2), [6, 8]);
		using window = whole.columns(2, 5);
		using live = Tensor.from(device, Int32Array.of(4));
		using x = window.withRowCount(live);
		using values = Tensor.from(device, Float32Array.of(0.5, 0));
		using rings = Tensor.from(device, Int32Array.of(0, 1, -1, 1, 0));
		using y = maskColumns(new Tape(device, { recording: false }), x, { rings, values, gradients: null });
		const factors = [0.5, 0, 1, 0, 0.5];
		const all = whole.toFloat32();
		const expected = Array.from(
			{ length: 20 },
			(_, at) => factors[at % 5]! * all[Math.floor(at / 5) * 8 + 2 + (at % 5)]!,
		);
		expect([...y.toFloat32().subarray(0, 20)]).toEqual(expected.map(Math.fround));
	});

	test("into parts, whose gradients are windows", () => {
		const rings = [0, 1, 1, 0, -1];
		using map = Tensor.from(device, Int32Array.from(rings));
		checkGradients(device, {
			inputs: {
				x: { values: randomValues(3 * 5, 3), shape: [3, 5] },
				values: { values: Float32Array.of(0.7, 0.2), shape: [2] },
			},
			forward: (tape, x) => {
				const [first, second] = splitColumns(tape, x.x!, [2, 3]);
				using left = first!;
				using right = second!;
				using half = map.columns(2, 3);
				using masked = maskColumns(tape, right, maskOf(x.values!, half.view([3])));
				left.share()[Symbol.dispose]();
				return masked.share();
			},
			reference: ({ x, values }) =>
				Float64Array.from({ length: 9 }, (_, at) => {
					const column = 2 + (at % 3);
					return x![Math.floor(at / 3) * 5 + column]! * factor(rings, values!, column);
				}),
		});
	});
});

test("channels of a convolution", () => {
	const [tokens, channels, taps] = [9, 3, 4];
	const rings = [0, 1, -1];
	using sequences = Sequences.of(device, [4, 5]);
	using ofBias = Tensor.from(device, Int32Array.from(rings));
	using ofWeight = Tensor.from(device, Int32Array.from(rings.flatMap((ring) => Array(taps).fill(ring))));
	checkGradients(device, {
		inputs: {
			x: { values: randomValues(tokens * channels, 1), shape: [tokens, channels] },
			values: { values: Float32Array.of(0.8, 0.3), shape: [2] },
		},
		parameters: {
			weight: { values: randomValues(channels * taps, 2), shape: [channels, 1, taps] },
			bias: { values: randomValues(channels, 3), shape: [channels] },
		},
		forward: (tape, x, w) => {
			const mask = maskOf(x.values!, ofWeight);
			return causalConv1d(tape, x.x!, w.weight!, w.bias!, sequences, {
				weight: mask,
				bias: { ...mask, rings: ofBias },
			});
		},
		reference: ({ x, values, weight, bias }) =>
			Float64Array.from({ length: tokens * channels }, (_, at) => {
				const [token, channel] = [Math.floor(at / channels), at % channels];
				const first = token < 4 ? 0 : 4;
				let p = bias![channel]!;
				for (let tap = 0; tap < taps; tap++) {
					const from = token - taps + 1 + tap;
					if (from >= first) p += weight![channel * taps + tap]! * x![from * channels + channel]!;
				}
				p *= factor(rings, values!, channel);
				return p / (1 + Math.exp(-p));
			}),
	});
});

describe("router logits", () => {
	const rings = [0, 0, 1, 1, 2];
	for (const sigmoid of [true, false]) {
		test(sigmoid ? "of which sigmoid scores are masked" : "multiplied", () => {
			using map = Tensor.from(device, Int32Array.from(rings));
			checkGradients(device, {
				inputs: {
					logits: { values: randomValues(70 * 5, 5, 3), shape: [70, 5] },
					values: { values: Float32Array.of(1, 0.6, 0.02), shape: [3] },
				},
				forward: (tape, x) => {
					const mask = { ...maskOf(x.values!, map), sigmoid, blockedBias: -1e30, ofBias: null };
					return maskScores(tape, x.logits!, mask, null).logits;
				},
				reference: ({ logits, values }) =>
					logits!.map((logit, at) => {
						const m = factor(rings, values!, at % 5);
						const score = m / (1 + Math.exp(-logit));
						return sigmoid ? Math.log(score / (1 - score)) : m * logit;
					}),
			});
		});
	}

	test("of experts that are left out reach nothing, and their bias is the one that is asked for", () => {
		using logits = Tensor.from(device, randomValues(2 * 5, 6), [2, 5]);
		using values = Tensor.from(device, Float32Array.of(1, 0.5, 0));
		using map = Tensor.from(device, Int32Array.from(rings));
		using bias = Tensor.from(device, Float32Array.of(1, 2, 3, 4, 5));
		const tape = new Tape(device, { recording: false });
		const soft = maskScores(
			tape,
			logits,
			{ rings: map, values, gradients: null, sigmoid: true, blockedBias: -1e30, ofBias: null },
			bias,
		);
		const plain = maskScores(
			tape,
			logits,
			{ rings: map, values, gradients: null, sigmoid: false, blockedBias: 0, ofBias: null },
			bias,
		);
		expect([...soft.bias!.toFloat32()]).toEqual([1, 2, 1.5, 2, Math.fround(-1e30)]);
		expect([...plain.bias!.toFloat32()]).toEqual([1, 2, 3, 4, 0]);
		expect([4, 9].map((at) => soft.logits.toFloat32()[at]!)).toEqual([-1e30, -1e30].map(Math.fround));
		for (const { logits, bias } of [soft, plain]) for (const owned of [logits, bias!]) owned[Symbol.dispose]();
	});
});
