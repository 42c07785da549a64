import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { splitColumns } from "../../src/tensor/ops/columns.ts";
import { type GatedDeltaInputs, gatedDelta, gatedDeltaStep } from "../../src/tensor/ops/gated-delta.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { type CheckedOperation, checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

interface Case extends Pick<GatedDeltaInputs, "keyHeads" | "keyDim" | "valueHeads" | "valueDim"> {
	readonly lengths: readonly number[];
}

const widthOf = ({ keyHeads, keyDim, valueHeads, valueDim }: Case) =>
	2 * keyHeads * keyDim + valueHeads * valueDim + 2 * valueHeads;

/** The recurrence in float64 on rows q | k | v | b | a; the states after every sequence go to `ends`. */
function reference(
	rows: Float64Array,
	dtBias: Float64Array,
	aLog: Float64Array,
	c: Case,
	ends?: number[],
): Float64Array {
	const { keyHeads: Hk, keyDim: K, valueHeads: Hv, valueDim: V } = c;
	const stride = widthOf(c);
	const o = new Float64Array((rows.length / stride) * Hv * V);
	let first = 0;
	for (const length of c.lengths) {
		for (let j = 0; j < Hv; j++) {
			const key = Math.floor((j * Hk) / Hv);
			const state = new Float64Array(K * V);
			for (let t = first; t < first + length; t++) {
				const at = (column: number) => rows[t * stride + column]!;
				const unit = (from: number) => {
					const x = Array.from({ length: K }, (_, i) => at(from + key * K + i));
					const factor = 1 / Math.sqrt(x.reduce((sum, value) => sum + value * value, 1e-6));
					return x.map((value) => value * factor);
				};
				const q = unit(0);
				const k = unit(Hk * K);
				const beta = 1 / (1 + Math.exp(-at(stride - 2 * Hv + j)));
				const decay = Math.exp(-Math.exp(aLog[j]!) * Math.log1p(Math.exp(at(stride - Hv + j) + dtBias[j]!)));
				for (let i = 0; i < K * V; i++) state[i]! *= decay;
				for (let p = 0; p < V; p++) {
					let read = 0;
					for (let i = 0; i < K; i++) read += state[i * V + p]! * k[i]!;
					const written = beta * (at(2 * Hk * K + j * V + p) - read);
					let y = 0;
					for (let i = 0; i < K; i++) {
						state[i * V + p]! += k[i]! * written;
						y += state[i * V + p]! * q[i]!;
					}
					o[(t * Hv + j) * V + p] = y / Math.sqrt(K);
				}
			}
			ends?.push(...state);
		}
		first += length;
	}
	return o;
}

/** Every input is a strided window of rows q | k | v | b | a. */
function deltaOfRows(tape: Tape, rows: Tensor, weights: Pick<GatedDeltaInputs, "dtBias" | "aLog">, c: Case): Tensor {
	using sequences = Sequences.of(tape.device, c.lengths);
	const [first, second] = splitColumns(tape, rows, [widthOf(c) - 2 * c.valueHeads, 2 * c.valueHeads]);
	using qkv = first!;
	using ba = second!;
	return gatedDelta(tape, { qkv, ba, ...weights, sequences, ...c });
}

function valuesOf(c: Case) {
	const tokens = c.lengths.reduce((sum, length) => sum + length, 0);
	return {
		rows: { values: randomValues(tokens * widthOf(c), 1), shape: [tokens, widthOf(c)] },
		dtBias: { values: randomValues(c.valueHeads, 2), shape: [c.valueHeads] },
		aLog: { values: randomValues(c.valueHeads, 3).map((value) => value - 1), shape: [c.valueHeads] },
	};
}

function operation(c: Case): CheckedOperation {
	const { rows, ...parameters } = valuesOf(c);
	return {
		inputs: { rows },
		parameters,
		forward: (tape, x, { dtBias, aLog }) => deltaOfRows(tape, x.rows!, { dtBias: dtBias!, aLog: aLog! }, c),
		reference: ({ rows: x, dtBias, aLog }) => reference(x!, dtBias!, aLog!, c),
	};
}

const small = { keyHeads: 2, keyDim: 3, valueHeads: 4, valueDim: 5 };

describe("gatedDelta", () => {
	for (const [lengths, sizes] of [
		[[7], small],
		[[5, 0, 1, 2, 0], small],
		[[6], { keyHeads: 1, keyDim: 1, valueHeads: 1, valueDim: 1 }],
		[[9, 3], { keyHeads: 1, keyDim: 19, valueHeads: 3, valueDim: 2 }],
		// Several heads, so that chance does not decide sums of few that rounding leaves.
		[[64, 1], { keyHeads: 1, keyDim: 4, valueHeads: 3, valueDim: 2 }],
		[[1, 129], { keyHeads: 1, keyDim: 3, valueHeads: 3, valueDim: 1 }],
		[[], small],
		[[0, 0], small],
	] as const) {
		test(`sequences of [${lengths}] tokens, ${Object.values(sizes).join(", ")}`, () => {
			checkGradients(device, operation({ ...sizes, lengths }));
		});
	}

	test("sizes of published models agree with the recurrence, and leave its states", () => {
		const c = { keyHeads: 2, keyDim: 128, valueHeads: 4, valueDim: 128, lengths: [130, 0, 33] };
		const { rows, dtBias, aLog } = valuesOf(c);
		const ends: number[] = [];
		const expected = reference(
			Float64Array.from(rows.values),
			Float64Array.from(dtBias.values),
			Float64Array.from(aLog.values),
			c,
			ends,
		);
		using x = Tensor.from(device, rows.values, rows.shape);
		using bias = new Parameter("dt_bias", Tensor.from(device, dtBias.values), null);
		using rate = new Parameter("A_log", Tensor.from(device, aLog.values), null);
		using sequences = Sequences.of(device, c.lengths);
		using qkv = x.columns(0, widthOf(c) - 8);
		using ba = x.columns(widthOf(c) - 8, 8);
		using finalState = Tensor.from(device, new Float32Array(ends.length).fill(1e9));
		const tape = new Tape(device, { recording: false });
		using o = gatedDelta(tape, { qkv, ba, dtBias: bias, aLog: rate, sequences, ...c, finalState });
		expect(relativeRms(o.toFloat32(), expected)).toBeLessThan(2e-6);
		expect(relativeRms(finalState.toFloat32(), ends)).toBeLessThan(2e-6);
	});

	test("a token that forgets everything leaves the decays after it exact", () => {
		const c = { keyHeads: 1, keyDim: 16, valueHeads: 2, valueDim: 16, lengths: [60] };
		const { rows, dtBias, aLog } = valuesOf(c);
		for (let head = 1; head <= 2; head++) rows.values[3 * widthOf(c) - head] = 3000;
		const expected = reference(
			...([rows.values, dtBias.values, aLog.values].map((x) => Float64Array.from(x)) as [
				Float64Array,
				Float64Array,
				Float64Array,
			]),
			c,
		);
		using x = Tensor.from(device, rows.values, rows.shape);
		using bias = new Parameter("dt_bias", Tensor.from(device, dtBias.values), null);
		using rate = new Parameter("A_log", Tensor.from(device, aLog.values), null);
		using o = deltaOfRows(new Tape(device, { recording: false }), x, { dtBias: bias, aLog: rate }, c);
		expect(relativeRms(o.toFloat32(), expected)).toBeLessThan(5e-7);
	});

	/** Output and gradients, from values that bf16 represents. */
	function run(on: Device, dtype: FloatDtype): Float32Array[] {
		const c = { keyHeads: 2, keyDim: 20, valueHeads: 6, valueDim: 12, lengths: [1, 100, 35] };
		const { rows, dtBias, aLog } = valuesOf(c);
		const round = (values: Float32Array) => values.map((value) => Math.round(value * 64) / 64);
		using plain = Tensor.from(on, round(rows.values), rows.shape, { dtype });
		using x = plain.withGradient(new GradientSlot(on, plain.shape, dtype));
		const parameter = (name: string, values: Float32Array) =>
			new Parameter(name, Tensor.from(on, values), Tensor.zeros(on, [values.length]));
		using bias = parameter("dt_bias", dtBias.values);
		using rate = parameter("A_log", aLog.values);
		const tape = new Tape(on, { recording: true });
		using o = deltaOfRows(tape, x, { dtBias: bias, aLog: rate }, c);
		o.gradient!.accumulate(Tensor.from(on, round(randomValues(o.elements, 4)), o.shape, { dtype }));
		tape.backward();
		using dx = x.gradient!.take()!;
		return [o, dx, bias.mainGradient!, rate.mainGradient!].map((tensor) => tensor.toFloat32());
	}

	test("bf16 storage gives the fp32 result, rounded", () => {
		const [wide, narrow] = [run(device, "f32"), run(device, "bf16")];
		for (const at of [0, 1]) expect(relativeRms(narrow[at]!, wide[at]!)).toBeLessThan(2 ** -8);
		// No value is rounded on the way to the parameters' gradients.
		const limit = device.library.kind === "cpu" ? 0 : 1e-6;
		for (const at of [2, 3]) expect(relativeRms(narrow[at]!, wide[at]!)).toBeLessThanOrEqual(limit);
	});

	test("one thread and two give the same bits", async () => {
		using single = await testDevice(1);
		expect(run(single, "f32")).toEqual(run(device, "f32"));
	});

	test("refuses shapes that do not fit", () => {
		const tape = new Tape(device, { recording: false });
		using sequences = Sequences.of(device, [2]);
		using qkv = Tensor.zeros(device, [2, 32]);
		using ba = Tensor.zeros(device, [2, 8]);
		using dtBias = new Parameter("dt_bias", Tensor.zeros(device, [4]), null);
		using aLog = new Parameter("A_log", Tensor.zeros(device, [3]), null);
		const inputs = { qkv, ba, dtBias, aLog, sequences, ...small };
		expect(() => gatedDelta(tape, inputs)).toThrow("The delta rule takes A_log as f32 [4], not f32 [3].");
		expect(() => gatedDelta(tape, { ...inputs, keyHeads: 3 })).toThrow("4 value heads are no multiple of 3 key heads.");
		expect(() => gatedDelta(tape, { ...inputs, keyDim: 4 })).toThrow(
			"The delta rule takes qkv as f32 [2, 36], not f32 [2,32].",
		);
		using slots = Tensor.from(device, Int32Array.of(0));
		using state = Tensor.zeros(device, [4, 15]);
		expect(() => gatedDeltaStep({ ...inputs, aLog: dtBias }, state, slots)).toThrow(
			"A step of 2 sequences cannot take slots [1], states [4,15].",
		);
	});
});
