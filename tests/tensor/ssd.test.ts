import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import type { ColumnMask } from "../../src/tensor/column-mask.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { splitColumns } from "../../src/tensor/ops/columns.ts";
import { type SsdInputs, ssdScan } from "../../src/tensor/ops/ssd.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { type CheckedOperation, checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";
import { factorOf, ringMask } from "./ring-masks.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

interface Case {
	readonly lengths: readonly number[];
	readonly heads: number;
	readonly headDim: number;
	readonly groups: number;
	readonly stateDim: number;
	readonly chunkSize: number;
	readonly dtMinimum?: number;
	readonly zMask?: ColumnMask;
}

/** The plain recurrence in float64 on rows z | x | B | C | dt. */
function reference(
	rows: Float64Array,
	dtBias: Float64Array,
	aLog: Float64Array,
	d: Float64Array,
	c: Case,
): Float64Array {
	const { heads: H, headDim: P, groups: G, stateDim: N } = c;
	const stride = 2 * H * P + 2 * G * N + H;
	const o = new Float64Array((rows.length / stride) * H * P);
	for (let j = 0; j < H; j++) {
		const group = Math.floor((j * G) / H);
		let t = 0;
		for (const length of c.lengths) {
			const state = new Float64Array(P * N);
			for (const end = t + length; t < end; t++) {
				const at = (column: number) => rows[t * stride + column]!;
				const v = at(stride - H + j) + dtBias[j]!;
				const step = Math.max(v > 20 ? v : Math.log1p(Math.exp(v)), c.dtMinimum ?? 0);
				const decay = Math.exp(-Math.exp(aLog[j]!) * step);
				for (let p = 0; p < P; p++) {
					const x = at(H * P + j * P + p);
					let y = d[j]! * x;
					for (let n = 0; n < N; n++) {
						const b = at(2 * H * P + group * N + n);
						state[p * N + n] = decay * state[p * N + n]! + step * x * b;
						y += state[p * N + n]! * at(2 * H * P + G * N + group * N + n);
					}
					const z = at(j * P + p);
					o[t * H * P + j * P + p] = (y * z) / (1 + Math.exp(-z));
				}
			}
		}
	}
	return o;
}

/** Splits rows z | x | B | C | dt as the Mamba layer does and scans: every input is a strided window. */
function scanRows(tape: Tape, rows: Tensor, parameters: Pick<SsdInputs, "dtBias" | "aLog" | "d">, c: Case): Tensor {
	using sequences = Sequences.of(tape.device, c.lengths);
	const inner = c.heads * c.headDim;
	const [z, xBC, dt] = splitColumns(tape, rows, [inner, inner + 2 * c.groups * c.stateDim, c.heads]);
	using gate = z!;
	using middle = xBC!;
	using step = dt!;
	return ssdScan(tape, { xBC: middle, z: gate, dt: step, ...parameters, sequences, ...c });
}

/** A checked operation; `aLog` and `dtBias` give every head's value, random ones by default. */
function operation(c: Case, values: { aLog?: number; dtBias?: number } = {}): CheckedOperation {
	const { heads: H, headDim: P, groups: G, stateDim: N } = c;
	const tokens = c.lengths.reduce((sum, length) => sum + length, 0);
	const width = 2 * H * P + 2 * G * N + H;
	const perHead = (seed: number, scale: number, shift: number) => randomValues(H, seed, scale).map((v) => v + shift);
	const constant = (value: number) => new Float32Array(H).fill(value);
	return {
		inputs: { rows: { values: randomValues(tokens * width, 1), shape: [tokens, width] } },
		parameters: {
			dtBias: { values: values.dtBias === undefined ? perHead(2, 1, -1) : constant(values.dtBias), shape: [H] },
			aLog: { values: values.aLog === undefined ? perHead(3, 0.7, 0.7) : constant(values.aLog), shape: [H] },
			d: { values: perHead(4, 1, 0), shape: [H] },
		},
		forward: (tape, { rows }, { dtBias, aLog, d }) => scanRows(tape, rows!, { dtBias: dtBias!, aLog: aLog!, d: d! }, c),
		reference: ({ rows, dtBias, aLog, d }) => reference(rows!, dtBias!, aLog!, d!, c),
	};
}

const small = { heads: 4, headDim: 3, groups: 2, stateDim: 5 };

describe("ssdScan", () => {
	test("a token that forgets everything leaves what its chunk hands on exact", () => {
		// A GPU sums a chunk's decays in fp32.
		if (device.library.kind !== "cpu") return;
		const c = { ...small, lengths: [100], chunkSize: 64 };
		const { inputs, parameters, forward, reference: exact } = operation(c);
		const { values, shape } = inputs.rows!;
		for (let head = 1; head <= c.heads; head++) values[3 * shape[1]! - head] = 3000;
		using rows = Tensor.from(device, values, shape);
		using stack = new DisposableStack();
		const weights = Object.fromEntries(
			Object.entries(parameters!).map(([name, given]) => [
				name,
				stack.use(new Parameter(name, Tensor.from(device, given.values), null)),
			]),
		);
		using o = forward(new Tape(device, { recording: false }), { rows }, weights);
		const all = { rows: values, ...Object.fromEntries(Object.entries(parameters!).map(([k, v]) => [k, v.values])) };
		const expected = exact(Object.fromEntries(Object.entries(all).map(([k, v]) => [k, Float64Array.from(v)])));
		const second = 64 * c.heads * c.headDim;
		expect(relativeRms(o.toFloat32().subarray(second), expected.subarray(second))).toBeLessThan(5e-7);
	});

	test("with masked columns of z", () => {
		const c = { ...small, lengths: [5, 2], chunkSize: 4 };
		const plain = operation(c);
		const inner = c.heads * c.headDim;
		const rings = Array.from({ length: inner }, (_, column) => (column % 4) - 1);
		checkGradients(device, {
			...plain,
			inputs: { ...plain.inputs, m: { values: Float32Array.of(0.9, 0.4, 0.1), shape: [3] } },
			forward: (tape, { rows, m }, { dtBias, aLog, d }) => {
				const zMask = ringMask(tape, m!, rings);
				return scanRows(tape, rows!, { dtBias: dtBias!, aLog: aLog!, d: d! }, { ...c, zMask });
			},
			reference: ({ rows, m, ...parameters }) => {
				const width = rows!.length / 7;
				const masked = rows!.map((value, at) => {
					const column = at % width;
					return column < inner ? factorOf(rings, m!, column) * value : value;
				});
				return plain.reference({ rows: masked, ...parameters });
			},
		});
	});

	for (const chunkSize of [1, 8, 32]) {
		test(`a sequence that fills no whole number of chunks of ${chunkSize}`, () => {
			checkGradients(device, operation({ ...small, lengths: [21], chunkSize }));
		});
	}

	test("packed sequences: on and off the chunk grid, over three chunks, of one token, empty", () => {
		const lengths = [8, 3, 20, 0, 1, 16, 0];
		checkGradients(device, operation({ heads: 2, headDim: 3, groups: 1, stateDim: 2, lengths, chunkSize: 8 }));
	});

	test("chunks longer than the library's own", () => {
		checkGradients(
			device,
			operation({ heads: 1, headDim: 2, groups: 1, stateDim: 3, lengths: [3, 147], chunkSize: 128 }),
		);
	});

	test("heads of a group in one task, and in several", () => {
		const lengths = [9, 9, 9, 9];
		checkGradients(device, operation({ heads: 3, headDim: 2, groups: 1, stateDim: 3, lengths, chunkSize: 4 }));
		checkGradients(device, operation({ heads: 11, headDim: 1, groups: 1, stateDim: 2, lengths, chunkSize: 4 }));
	});

	test("wider than a vector", () => {
		checkGradients(
			device,
			operation({ heads: 1, headDim: 17, groups: 1, stateDim: 19, lengths: [5, 2], chunkSize: 4 }),
		);
	});

	test("no tokens", () => {
		checkGradients(device, operation({ ...small, lengths: [], chunkSize: 8 }));
		checkGradients(device, operation({ ...small, lengths: [0, 0], chunkSize: 8 }));
	});

	test("strong decay: A = -16, Δ around 0.1, and far beyond", () => {
		const shape = { heads: 2, headDim: 2, groups: 1, stateDim: 2, lengths: [40], chunkSize: 32 };
		checkGradients(device, operation(shape, { aLog: Math.log(16), dtBias: Math.log(Math.expm1(0.1)) }));
		checkGradients(device, operation(shape, { aLog: Math.log(16), dtBias: 5 }));
	});

	test("hardly any decay, steps past the softplus threshold", () => {
		const shape = { heads: 2, headDim: 2, groups: 1, stateDim: 2, lengths: [20], chunkSize: 8 };
		// Slower still, and the reference's own central differences no longer resolve the gradient of A_log.
		checkGradients(device, operation(shape, { aLog: -4, dtBias: -4 }));
		checkGradients(device, operation(shape, { aLog: -4, dtBias: 22 }));
	});

	test("steps held at their minimum have no gradient of their own", () => {
		checkGradients(device, operation({ ...small, lengths: [6, 11], chunkSize: 8, dtMinimum: 0.3 }));
	});

	test("a NaN step is not hidden", () => {
		const c = { heads: 1, headDim: 1, groups: 1, stateDim: 1, lengths: [3], chunkSize: 2, dtMinimum: 0.1 };
		using rows = Tensor.from(device, new Float32Array(15).fill(1), [3, 5]);
		using zero = new Parameter("A_log", Tensor.zeros(device, [1]), null);
		using nan = new Parameter("dt_bias", Tensor.from(device, new Float32Array([Number.NaN])), null);
		using o = scanRows(new Tape(device, { recording: false }), rows, { dtBias: nan, aLog: zero, d: zero }, c);
		expect(o.toFloat32().every(Number.isNaN)).toBe(true);
	});

	test("without gradients the output is the same and nothing is kept", () => {
		const c = { ...small, lengths: [10, 4], chunkSize: 8 };
		const before = device.memoryStatistics().liveBytes;
		const { inputs, parameters, reference: expected } = operation(c);
		const values = { ...inputs, ...parameters };
		{
			using rows = Tensor.from(device, inputs.rows!.values, inputs.rows!.shape);
			const frozen = (name: string) =>
				new Parameter(name, Tensor.from(device, parameters![name]!.values, [c.heads]), null);
			using dtBias = frozen("dtBias");
			using aLog = frozen("aLog");
			using d = frozen("d");
			using o = scanRows(new Tape(device, { recording: true }), rows, { dtBias, aLog, d }, c);
			expect(o.gradient).toBeNull();
			const wide = Object.fromEntries(
				Object.entries(values).map(([name, { values: v }]) => [name, Float64Array.from(v)]),
			);
			expect(relativeRms(o.toFloat32(), expected(wide))).toBeLessThan(2e-6);
		}
		expect(device.memoryStatistics().liveBytes).toBe(before);
	});

	/** Output, gradients of z | x | B | C | dt, dt_bias, A_log and D; all inputs representable in bf16. */
	function run(on: Device, dtype: FloatDtype, chunkSize: number): Float32Array[] {
		const c = { heads: 12, headDim: 32, groups: 2, stateDim: 16, lengths: [70, 0, 130, 1], chunkSize };
		const rounded = (count: number, seed: number) => randomValues(count, seed).map((v) => Math.round(v * 64) / 64);
		const width = 2 * 384 + 2 * 32 + 12;
		using plain = Tensor.from(on, rounded(201 * width, 1), [201, width], { dtype });
		using rows = plain.withGradient(new GradientSlot(on, plain.shape, dtype));
		const parameter = (name: string, seed: number) =>
			new Parameter(name, Tensor.from(on, rounded(12, seed)), Tensor.zeros(on, [12]));
		using dtBias = parameter("dt_bias", 2);
		using aLog = parameter("A_log", 3);
		using d = parameter("D", 4);
		const tape = new Tape(on, { recording: true });
		using o = scanRows(tape, rows, { dtBias, aLog, d }, c);
		o.gradient!.accumulate(Tensor.from(on, rounded(201 * 384, 5), o.shape, { dtype }));
		tape.backward();
		using gradient = rows.gradient!.take()!;
		return [o, gradient, dtBias.mainGradient!, aLog.mainGradient!, d.mainGradient!].map((t) => t.toFloat32());
	}

	test("bf16 storage gives the fp32 result, rounded", () => {
		const [wide, narrow] = [run(device, "f32", 32), run(device, "bf16", 32)];
		expect(relativeRms(narrow[0]!, wide[0]!)).toBeLessThan(2 ** -8);
		expect(relativeRms(narrow[1]!, wide[1]!)).toBeLessThan(2 ** -8);
		// No value is rounded to bf16 on the way to the parameters' gradients.
		for (const index of [2, 3, 4]) expect(relativeRms(narrow[index]!, wide[index]!)).toBeLessThan(1e-6);
	});

	test("one thread and two give the same bits", async () => {
		using single = await testDevice(1);
		expect(run(single, "f32", 32)).toEqual(run(device, "f32", 32));
	});

	test("the chunk size changes rounding only", () => {
		const whole = run(device, "f32", 256);
		for (const chunkSize of [1, 8, 32]) {
			for (const [index, values] of run(device, "f32", chunkSize).entries()) {
				expect(relativeRms(values, whole[index]!)).toBeLessThan(2e-6);
			}
		}
	});

	test("refuses what does not fit", () => {
		const tape = new Tape(device, { recording: false });
		using sequences = Sequences.of(device, [2]);
		using xBC = Tensor.zeros(device, [2, 4 * 3 + 2 * 2 * 5]);
		using z = Tensor.zeros(device, [2, 12]);
		using dt = Tensor.zeros(device, [2, 3]);
		using perHead = new Parameter("D", Tensor.zeros(device, [4]), null);
		using narrow = new Parameter("A_log", Tensor.zeros(device, [4], "bf16"), null);
		const inputs = { xBC, z, dt, dtBias: perHead, aLog: perHead, d: perHead, sequences, ...small, chunkSize: 8 };
		expect(() => ssdScan(tape, inputs)).toThrow("The scan takes dt as f32 [2, 4], not f32 [2,3].");
		expect(() => ssdScan(tape, { ...inputs, groups: 3 })).toThrow("4 heads do not fall into 3 groups.");
		using right = Tensor.zeros(device, [2, 4]);
		expect(() => ssdScan(tape, { ...inputs, dt: right, aLog: narrow })).toThrow(
			"The scan takes A_log as f32 [4], not bf16 [4].",
		);
	});
});
