/** A step by one token gives what whole sequences give for their last token, for sizes that are no multiple of a vector. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { attention, attentionStep } from "../../src/tensor/ops/attention.ts";
import { causalConv1d, causalConv1dStep } from "../../src/tensor/ops/causal-conv1d.ts";
import { gatedDelta, gatedDeltaStep, stateElements } from "../../src/tensor/ops/gated-delta.ts";
import { ssdScan, ssdStep } from "../../src/tensor/ops/ssd.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { copyInto, type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
let tape: Tape;
beforeAll(async () => {
	device = await testDevice();
	tape = new Tape(device, { recording: false });
});
afterAll(() => device[Symbol.dispose]());

/** Largest relative rms difference by storage type. */
const tolerances: readonly (readonly [FloatDtype, number])[] = [
	["f32", 2e-6],
	["bf16", 4e-3],
];

const tensor = (values: Float32Array, shape: readonly number[], dtype: FloatDtype) =>
	Tensor.from(device, values, shape, { dtype });
const parameter = (name: string, values: Float32Array, shape: readonly number[] = [values.length]) =>
	new Parameter(name, Tensor.from(device, values, shape), null);

describe("attentionStep", () => {
	for (const [dtype, tolerance, window, withSinks] of tolerances.flatMap(([dtype, tolerance]) => [
		[dtype, tolerance, null, false] as const,
		[dtype, tolerance, 256, false] as const,
		[dtype, tolerance, 300, true] as const,
	])) {
		const seen = `${window === null ? "" : `, in a window of ${window}`}${withSinks ? ", with sinks" : ""}`;
		test(`${dtype}${seen}: runs of keys are joined, rows of other sequences stay as they are`, () => {
			const heads = { queryHeads: 6, keyHeads: 2, headDim: 20 };
			const width = (6 + 4) * 20;
			const lengths = [0, 1, 255, 256, 700];
			const logits = withSinks ? new Float32Array([2, -3, 0, 12, 1, 5]) : null;
			using sinks = logits && new Parameter("sinks", tensor(logits, [6], dtype), null);
			const rows = lengths.map((length) => length + 3);
			const total = rows.reduce((sum, count) => sum + count, 0);
			const firstRows = rows.map((_, s) => rows.slice(0, s).reduce((sum, count) => sum + count, 0));
			const values = lengths.map((length, s) => randomValues((length + 1) * width, s + 1, 2));
			const expected = lengths.flatMap((length, s) => {
				using qkv = tensor(values[s]!, [length + 1, width], dtype);
				using sequences = Sequences.of(device, [length + 1]);
				using o = attention(tape, qkv, { ...heads, sequences, mask: "causal", softmaxScale: 0.3, window, sinks });
				return [...o.toFloat32().subarray(length * 120)];
			});
			// The group of key head g has its 3 queries, then key and value.
			const cached = (part: number) => {
				const kept = new Float32Array(2 * total * 20).fill(1e9);
				for (const [s, length] of lengths.entries()) {
					for (let t = 0; t < length; t++) {
						for (let g = 0; g < 2; g++) {
							const from = t * width + (g * 5 + part) * 20;
							kept.set(values[s]!.subarray(from, from + 20), (g * total + firstRows[s]! + t) * 20);
						}
					}
				}
				return kept;
			};
			const newest = Float32Array.from(lengths.flatMap((length, s) => [...values[s]!.subarray(length * width)]));
			using keys = tensor(cached(3), [2 * total, 20], dtype);
			using kept = tensor(cached(4), [2 * total, 20], dtype);
			const before = keys.toFloat32();
			using qkv = tensor(newest, [lengths.length, width], dtype);
			using first = Tensor.from(device, Int32Array.from(firstRows));
			using sizes = Tensor.from(device, Int32Array.from(lengths));
			const cache = { keys, values: kept, rows: total };
			const places = { firstRows: first, lengths: sizes, maxLength: 800 };
			using o = attentionStep(qkv, cache, places, { ...heads, softmaxScale: 0.3, window, sinks });
			expect(relativeRms(o.toFloat32(), expected)).toBeLessThan(tolerance);
			const after = keys.toFloat32();
			const changed = new Set<number>();
			for (const [i, value] of after.entries()) if (value !== before[i]) changed.add(Math.floor(i / 20));
			const own = lengths.flatMap((length, s) => [0, total].map((head) => head + firstRows[s]! + length));
			expect([...changed].sort((a, b) => a - b)).toEqual(own.sort((a, b) => a - b));
		});
	}

	test("refuses a cache that is too small", () => {
		using qkv = tensor(randomValues(12, 1), [1, 12], "f32");
		using keys = tensor(randomValues(8, 2), [2, 4], "f32");
		using first = Tensor.from(device, Int32Array.of(0));
		using lengths = Tensor.from(device, Int32Array.of(2));
		const cache = { keys, values: keys, rows: 2 };
		const heads = { queryHeads: 1, keyHeads: 1, headDim: 4, softmaxScale: 1 };
		// A GPU would have to read the lengths back to know.
		if (device.library.kind === "cpu") {
			expect(() => attentionStep(qkv, cache, { firstRows: first, lengths, maxLength: 2 }, heads)).toThrow();
		}
	});
});

describe("causalConv1dStep", () => {
	for (const [dtype, tolerance] of tolerances) {
		for (const [channels, width, biased] of [
			[13, 4, true],
			[13, 4, false],
			[700, 2, true],
			[5, 1, true],
		] as const) {
			test(`${dtype}: ${channels} channels, ${width} taps, ${biased ? "a" : "no"} bias, twice in a row`, () => {
				const [tokens, slots] = [9, 3];
				const x = randomValues(tokens * channels, 1, 2);
				const weight = parameter("weight", randomValues(channels * width, 2), [channels, 1, width]);
				const bias = biased ? parameter("bias", randomValues(channels, 3)) : null;
				using all = tensor(x, [tokens, channels], dtype);
				using sequences = Sequences.of(device, [tokens]);
				using whole = causalConv1d(tape, all, weight, bias, sequences);
				const past = new Float32Array(slots * (width - 1) * channels);
				past.set(x.subarray((tokens - width - 1) * channels, (tokens - 2) * channels), 2 * (width - 1) * channels);
				using window = tensor(past, [slots, width - 1, channels], dtype);
				using slot = Tensor.from(device, Int32Array.of(2));
				for (const token of [tokens - 2, tokens - 1]) {
					using row = all.rowsFrom(token, 1);
					using y = causalConv1dStep(row, weight, bias, window, slot);
					const expected = whole.toFloat32().subarray(token * channels, (token + 1) * channels);
					expect(relativeRms(y.toFloat32(), expected)).toBeLessThan(tolerance);
				}
				const left = window.toFloat32().subarray(2 * (width - 1) * channels);
				const newest = all.toFloat32().subarray((tokens - width + 1) * channels);
				expect([...left]).toEqual([...newest]);
				for (const owned of [weight, ...(bias ? [bias] : [])]) owned.value[Symbol.dispose]();
			});
		}
	}
});

describe("ssdStep", () => {
	for (const [dtype, tolerance] of tolerances) {
		for (const dtMinimum of [0, 0.5]) {
			test(`${dtype}, Δ from ${dtMinimum}: goes on from the scan's last states`, () => {
				const shape = { heads: 6, headDim: 10, groups: 2, stateDim: 20, chunkSize: 8, dtMinimum };
				const lengths = [1, 0, 8, 21];
				const parts = [60, 60 + 80, 6] as const;
				const width = parts[0] + parts[1] + parts[2];
				const tokens = 30;
				const rows = tensor(randomValues(tokens * width, 1), [tokens, width], dtype);
				const perHead = (name: string, seed: number, shift: number) =>
					parameter(
						name,
						randomValues(6, seed).map((value) => value + shift),
					);
				const weights = {
					dtBias: perHead("dt_bias", 2, -1),
					aLog: perHead("A_log", 3, 0.5),
					d: perHead("D", 4, 0),
				};
				const inputs = (of: Tensor) => ({
					z: of.columns(0, 60),
					xBC: of.columns(60, 140),
					dt: of.columns(200, 6),
				});
				const release = (made: Readonly<Record<string, Tensor>>) => {
					for (const owned of Object.values(made)) owned[Symbol.dispose]();
				};
				/** The states after all but the last token, and the outputs of the last token. */
				const longer = inputs(rows);
				using sequences = Sequences.of(device, lengths);
				using whole = ssdScan(tape, { ...longer, ...weights, ...shape, sequences });
				release(longer);
				const states = new Float32Array(4 * 6 * 10 * 20).fill(1e9);
				const ends = lengths.map((_, s) => lengths.slice(0, s + 1).reduce((sum, length) => sum + length, 0));
				const slots = [3, 1, 0, 2];
				for (const [s, length] of lengths.entries()) {
					using shorter = rows.rowsFrom(ends[s]! - length, Math.max(0, length - 1));
					const own = inputs(shorter);
					using before = Sequences.of(device, [shorter.rows]);
					// Sequences without a token leave zeros, whatever was there.
					using state = Tensor.from(device, new Float32Array(6 * 10 * 20).fill(1e9), [6 * 10, 20]);
					ssdScan(tape, { ...own, ...weights, ...shape, sequences: before, finalState: state })[Symbol.dispose]();
					release(own);
					states.set(state.toFloat32(), slots[s]! * 1200);
				}
				using state = Tensor.from(device, states, [4 * 60, 20]);
				const live = [0, 2, 3];
				for (const s of live) {
					using row = rows.rowsFrom(ends[s]! - 1, 1);
					using slot = Tensor.from(device, Int32Array.of(slots[s]!));
					const own = inputs(row);
					using o = ssdStep({ ...own, ...weights, ...shape }, state, slot);
					release(own);
					const expected = whole.toFloat32().subarray((ends[s]! - 1) * 60, ends[s]! * 60);
					expect(relativeRms(o.toFloat32(), expected)).toBeLessThan(tolerance);
				}
				// And the states are those of the scan over all tokens; an empty sequence's are zero.
				const again = inputs(rows);
				using final = Tensor.empty(device, [4 * 60, 20]);
				ssdScan(tape, { ...again, ...weights, ...shape, sequences, finalState: final })[Symbol.dispose]();
				release(again);
				const after = state.toFloat32();
				for (const s of live) {
					const at = slots[s]! * 1200;
					expect(
						relativeRms(after.subarray(at, at + 1200), final.toFloat32().subarray(s * 1200, (s + 1) * 1200)),
					).toBeLessThan(2e-6);
				}
				expect(
					final
						.toFloat32()
						.subarray(1200, 2400)
						.every((value) => value === 0),
				).toBe(true);
				rows[Symbol.dispose]();
				for (const { value } of Object.values(weights)) value[Symbol.dispose]();
			});
		}
	}
});

describe("gatedDeltaStep", () => {
	for (const [dtype, tolerance] of tolerances) {
		test(`${dtype}: goes on from the states that whole sequences leave`, () => {
			const shape = { keyHeads: 2, keyDim: 20, valueHeads: 6, valueDim: 10 };
			const lengths = [1, 8, 71];
			const [width, tokens, floats] = [2 * 40 + 60 + 12, 80, stateElements(shape)];
			const rows = tensor(randomValues(tokens * width, 1), [tokens, width], dtype);
			const weights = {
				dtBias: parameter("dt_bias", randomValues(6, 2)),
				aLog: parameter("A_log", randomValues(6, 3)),
			};
			const on = <Result>(
				of: Tensor,
				run: (inputs: { qkv: Tensor; ba: Tensor } & typeof weights & typeof shape) => Result,
			) => {
				using qkv = of.columns(0, width - 12);
				using ba = of.columns(width - 12, 12);
				return run({ qkv, ba, ...weights, ...shape });
			};
			const whole = (of: Tensor, counts: readonly number[], finalState: Tensor) => {
				using sequences = Sequences.of(device, counts);
				return on(of, (inputs) => gatedDelta(tape, { ...inputs, sequences, finalState }));
			};
			using final = Tensor.empty(device, [3, floats]);
			using expected = whole(rows, lengths, final);
			const slots = [3, 0, 2];
			const states = new Float32Array(4 * floats).fill(1e9);
			const ends = [1, 9, 80];
			for (const [s, length] of lengths.entries()) {
				using before = rows.rowsFrom(ends[s]! - length, length - 1);
				// A sequence without tokens leaves zeros, whatever was there.
				using state = Tensor.from(device, new Float32Array(floats).fill(1e9));
				whole(before, [length - 1], state)[Symbol.dispose]();
				states.set(state.toFloat32(), slots[s]! * floats);
			}
			using state = Tensor.from(device, states, [4, floats]);
			using slot = Tensor.from(device, Int32Array.from(slots));
			const last = ends.map((end) => rows.rowsFrom(end - 1, 1));
			using newest = Tensor.empty(device, [3, width], dtype);
			for (const [s, row] of last.entries()) {
				using to = newest.rowsFrom(s, 1);
				copyInto(row, to);
				row[Symbol.dispose]();
			}
			using o = on(newest, (inputs) => gatedDeltaStep(inputs, state, slot));
			const outputs = expected.toFloat32();
			const ofEnds = ends.flatMap((end) => [...outputs.subarray((end - 1) * 60, end * 60)]);
			expect(relativeRms(o.toFloat32(), ofEnds)).toBeLessThan(tolerance);
			const after = state.toFloat32();
			const kept = slots.flatMap((at) => [...after.subarray(at * floats, (at + 1) * floats)]);
			expect(relativeRms(kept, final.toFloat32())).toBeLessThan(2e-6);
			rows[Symbol.dispose]();
			for (const { value } of Object.values(weights)) value[Symbol.dispose]();
		});
	}
});
