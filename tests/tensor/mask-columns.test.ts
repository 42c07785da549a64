/** Masks of columns, of a convolution's channels and of router logits against float64 (docs/spec/elastic.md §9, §10). */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { causalConv1d } from "../../src/tensor/ops/causal-conv1d.ts";
import { splitColumns } from "../../src/tensor/ops/columns.ts";
import { addMaskedColumns, addScaledColumns, maskColumns, maskScores } from "../../src/tensor/ops/mask-columns.ts";
import { FactorSources } from "../../src/tensor/ops/mask-factors.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";
import { factorOf, ringMask, scaleMask } from "./ring-masks.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

test("factors of several microbatches come from their values, and their gradients go back there", () => {
	using sources = new FactorSources(device, Int32Array.of(2, -1, 0, 2, 0, 0, -1), 3);
	using values = Tensor.from(device, Float32Array.of(1, 2, 3, 4, 5, 6), [2, 3]);
	using factors = sources.spread(values);
	expect([...factors.toFloat32()]).toEqual([3, 1, 1, 3, 1, 1, 1, 6, 1, 4, 6, 4, 4, 1]);
	using dfactors = Tensor.from(
		device,
		Float32Array.from({ length: 14 }, (_, at) => at),
		[2, 7],
	);
	using dvalues = sources.gather(dfactors);
	expect([...dvalues.toFloat32()]).toEqual([2 + 4 + 5, 0, 3, 9 + 11 + 12, 0, 7 + 10]);
});

describe("columns", () => {
	for (const [name, rows, rings] of [
		["in rings", 7, [0, 0, 1, 2, 2, -1, 1, 0, 2, -1, 1]],
		["in rings, many rows", 70, [0, 1, 2, 2, 0, -1, 2, 1]],
	] as const) {
		const width = rings.length;
		const x = { values: randomValues(rows * width, 1), shape: [rows, width] };
		const values = { values: Float32Array.of(0.9, 0.4, 0.15), shape: [3] };
		test(name, () => {
			checkGradients(device, {
				inputs: { x, values },
				forward: (tape, { x, values }) =>
					maskColumns(tape, x!, { columns: ringMask(tape, values!, rings), scale: null }),
				reference: ({ x, values }) => x!.map((value, at) => value * factorOf(rings, values!, at % width)),
			});
		});

		test(`${name}, added to other columns and scaled`, () => {
			checkGradients(device, {
				inputs: {
					x,
					values,
					a: { values: randomValues(rows * width, 2), shape: [rows, width] },
					s: { values: Float32Array.of(0.7), shape: [1] },
				},
				forward: (tape, { a, x, values, s }) => {
					const mask = { columns: ringMask(tape, values!, rings), scale: scaleMask(tape, s!, width) };
					return addMaskedColumns(tape, a!, x!, mask);
				},
				reference: ({ a, x, values, s }) =>
					x!.map((value, at) => a![at]! + s![0]! * value * factorOf(rings, values!, at % width)),
			});
		});
	}

	test.each([7, 70])("by a trained factor each, added to other columns, %i rows", (rows) => {
		const width = 11;
		checkGradients(device, {
			inputs: {
				a: { values: randomValues(rows * width, 2), shape: [rows, width] },
				x: { values: randomValues(rows * width, 1), shape: [rows, width] },
			},
			parameters: { scale: { values: randomValues(width, 3), shape: [width] } },
			forward: (tape, { a, x }, { scale }) => addScaledColumns(tape, a!, x!, scale!),
			reference: ({ a, x, scale }) => x!.map((value, at) => a![at]! + scale![at % width]! * value),
		});
	});

	test("all of one factor", () => {
		checkGradients(device, {
			inputs: {
				x: { values: randomValues(5 * 6, 1), shape: [5, 6] },
				s: { values: Float32Array.of(0.9), shape: [1] },
			},
			forward: (tape, { x, s }) => maskColumns(tape, x!, { columns: null, scale: scaleMask(tape, s!, 6) }),
			reference: ({ x, s }) => x!.map((value) => value * s![0]!),
		});
	});

	test("of a window, and of the live rows alone", () => {
		using whole = Tensor.from(device, randomValues(6 * 8, 2), [6, 8]);
		using window = whole.columns(2, 5);
		using live = Tensor.from(device, Int32Array.of(4));
		using x = window.withRowCount(live);
		const factors = [0.5, 0, 1, 0, 0.5];
		using list = Tensor.from(device, Float32Array.from(factors));
		const columns = { factors: list, gradients: null };
		using y = maskColumns(new Tape(device, { recording: false }), x, { columns, scale: null });
		const all = whole.toFloat32();
		const expected = Array.from(
			{ length: 20 },
			(_, at) => factors[at % 5]! * all[Math.floor(at / 5) * 8 + 2 + (at % 5)]!,
		);
		// A masked value is 0 of either sign.
		expect(Array.from(y.toFloat32().subarray(0, 20), (value) => value + 0)).toEqual(
			expected.map((value) => Math.fround(value) + 0),
		);
	});

	test("into parts, whose gradients are windows", () => {
		const rings = [0, 1, 1, 0, -1];
		checkGradients(device, {
			inputs: {
				x: { values: randomValues(3 * 5, 3), shape: [3, 5] },
				values: { values: Float32Array.of(0.7, 0.2), shape: [2] },
			},
			forward: (tape, x) => {
				const [first, second] = splitColumns(tape, x.x!, [2, 3]);
				using left = first!;
				using right = second!;
				const columns = ringMask(tape, x.values!, rings.slice(2));
				using masked = maskColumns(tape, right, { columns, scale: null });
				left.share()[Symbol.dispose]();
				return masked.share();
			},
			reference: ({ x, values }) =>
				Float64Array.from({ length: 9 }, (_, at) => {
					const column = 2 + (at % 3);
					return x![Math.floor(at / 3) * 5 + column]! * factorOf(rings, values!, column);
				}),
		});
	});
});

test("channels of a convolution", () => {
	const [tokens, channels, taps] = [9, 3, 4];
	const rings = [0, 1, -1];
	using sequences = Sequences.of(device, [4, 5]);
	const ofWeight = rings.flatMap((ring) => Array<number>(taps).fill(ring));
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
			const mask = { weight: ringMask(tape, x.values!, ofWeight), bias: ringMask(tape, x.values!, rings) };
			return causalConv1d(tape, x.x!, w.weight!, w.bias!, sequences, mask);
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
				p *= factorOf(rings, values!, channel);
				return p / (1 + Math.exp(-p));
			}),
	});
});

describe("router logits", () => {
	const rings = [0, 0, 1, 1, 2];
	for (const sigmoid of [true, false]) {
		test(sigmoid ? "of which sigmoid scores are masked" : "multiplied", () => {
			checkGradients(device, {
				inputs: {
					logits: { values: randomValues(70 * 5, 5, 3), shape: [70, 5] },
					values: { values: Float32Array.of(1, 0.6, 0.02), shape: [3] },
				},
				forward: (tape, x) => {
					const mask = { ...ringMask(tape, x.values!, rings), sigmoid, blockedBias: -1e30, ofBias: null };
					return maskScores(tape, x.logits!, mask, null).logits;
				},
				reference: ({ logits, values }) =>
					logits!.map((logit, at) => {
						const m = factorOf(rings, values!, at % 5);
						const score = m / (1 + Math.exp(-logit));
						return sigmoid ? Math.log(score / (1 - score)) : m * logit;
					}),
			});
		});
	}

	test("of experts that are left out reach nothing, and their bias is the one that is asked for", () => {
		using logits = Tensor.from(device, randomValues(2 * 5, 6), [2, 5]);
		using factors = Tensor.from(device, Float32Array.of(1, 1, 0.5, 0.5, 0));
		using bias = Tensor.from(device, Float32Array.of(1, 2, 3, 4, 5));
		const tape = new Tape(device, { recording: false });
		const soft = maskScores(
			tape,
			logits,
			{ factors, gradients: null, sigmoid: true, blockedBias: -1e30, ofBias: null },
			bias,
		);
		const plain = maskScores(
			tape,
			logits,
			{ factors, gradients: null, sigmoid: false, blockedBias: 0, ofBias: null },
			bias,
		);
		expect([...soft.bias!.toFloat32()]).toEqual([1, 2, 1.5, 2, Math.fround(-1e30)]);
		expect([...plain.bias!.toFloat32()]).toEqual([1, 2, 3, 4, 0]);
		expect([4, 9].map((at) => soft.logits.toFloat32()[at]!)).toEqual([-1e30, -1e30].map(Math.fround));
		for (const { logits, bias } of [soft, plain]) for (const owned of [logits, bias!]) owned[Symbol.dispose]();
	});
});
