import { describe, expect, test } from "bun:test";
import { Distribution } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { type AttentionOptions, attention } from "../../src/tensor/ops/attention.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { referenceAttention } from "./attention-reference.ts";
import { openDevices } from "./devices.ts";

let device: Device;
let oneThread: Device;
openDevices((two, one) => {
	[device, oneThread] = [two, one];
});

interface Case {
	readonly lengths: readonly number[];
	readonly queryHeads: number;
	readonly keyHeads: number;
	readonly headDim: number;
	readonly valueDim?: number;
	readonly mask: "causal" | "full";
	readonly softmaxScale?: number;
	readonly window?: number;
	readonly sinks?: readonly number[];
	readonly options?: Partial<AttentionOptions>;
	/** Columns of a wider tensor around the projection. */
	readonly padding?: number;
}

const sum = (values: readonly number[]) => values.reduce((a, b) => a + b, 0);
const valuesOf = (c: Case) => c.valueDim ?? c.headDim;
const widthOf = (c: Case) => (c.queryHeads + c.keyHeads) * c.headDim + c.keyHeads * valuesOf(c);
const inputOf = (c: Case, seed = 1) => randomValues(sum(c.lengths) * widthOf(c), seed, 2);
const outputGradientOf = (c: Case) => randomValues(sum(c.lengths) * c.queryHeads * valuesOf(c), 2);
const label = (c: Case) =>
	`${c.mask}${c.sinks ? " with sinks" : ""}${c.window ? ` in a window of ${c.window}` : ""}, lengths ${c.lengths.join(" ") || "none"}, ${c.queryHeads}/${c.keyHeads} heads of ${c.headDim}${c.valueDim ? ` and values of ${c.valueDim}` : ""}`;

/** Output and projection gradient of the kernels; every byte of device memory is back afterwards. */
function run(
	on: Device,
	c: Case,
	values: Float32Array,
	dtype: FloatDtype = "f32",
): { o: Float32Array; gradient: Float32Array; sinks?: Float32Array } {
	const before = on.memoryStatistics().liveBytes;
	const result = (() => {
		const width = widthOf(c);
		const tokens = sum(c.lengths);
		const padding = c.padding ?? 0;
		const padded = new Float32Array(tokens * (width + 2 * padding)).fill(Number.NaN);
		for (let t = 0; t < tokens; t++) {
			padded.set(values.subarray(t * width, (t + 1) * width), t * (width + 2 * padding) + padding);
		}
		using whole = Tensor.from(on, padded, [tokens, width + 2 * padding], { dtype });
		using window = whole.columns(padding, width);
		using qkv = window.withGradient(new GradientSlot(on, window.shape, dtype));
		using sequences = Sequences.of(on, c.lengths);
		const tape = new Tape(on, { recording: true });
		using sinks = c.sinks
			? new Parameter(
					"sinks",
					Tensor.from(on, Float32Array.from(c.sinks), undefined, { dtype }),
					Tensor.zeros(on, [c.queryHeads]),
				)
			: null;
		using o = attention(tape, qkv, { ...c, ...c.options, sequences, sinks });
		o.gradient!.accumulate(Tensor.from(on, outputGradientOf(c), o.shape, { dtype }));
		tape.backward();
		using gradient = qkv.gradient!.take()!;
		const ofSinks = sinks ? { sinks: sinks.mainGradient!.toFloat32() } : {};
		return { o: o.toFloat32(), gradient: gradient.toFloat32(), ...ofSinks };
	})();
	expect(on.memoryStatistics().liveBytes).toBe(before);
	return result;
}

function reference(c: Case, values: Float32Array, keep?: (token: number, head: number, key: number) => number) {
	const result = referenceAttention(Float64Array.from(values), {
		...c,
		causal: c.mask === "causal",
		scale: c.softmaxScale ?? 1 / Math.sqrt(c.headDim),
		...(keep ? { keep } : {}),
	});
	return { o: result.o, gradient: result.gradient(outputGradientOf(c)) };
}

describe("attention against central differences", () => {
	const cases: Case[] = [
		{ lengths: [5, 0, 1, 3], queryHeads: 2, keyHeads: 2, headDim: 3, mask: "causal" },
		{ lengths: [7, 1], queryHeads: 4, keyHeads: 2, headDim: 2, mask: "full", softmaxScale: 0.3 },
		{ lengths: [4, 3], queryHeads: 4, keyHeads: 1, headDim: 5, mask: "causal" },
		{ lengths: [6, 2, 1], queryHeads: 4, keyHeads: 2, headDim: 3, mask: "causal", window: 3 },
		{ lengths: [4], queryHeads: 1, keyHeads: 1, headDim: 4, mask: "causal", window: 1 },
		{ lengths: [5, 0, 1, 3], queryHeads: 4, keyHeads: 2, headDim: 3, mask: "causal", sinks: [1.5, -2, 0, 9] },
		{ lengths: [6, 2], queryHeads: 2, keyHeads: 1, headDim: 4, mask: "causal", window: 3, sinks: [0.3, -40] },
		{ lengths: [0], queryHeads: 2, keyHeads: 1, headDim: 4, mask: "causal", sinks: [1, 2] },
		{ lengths: [5, 0, 2], queryHeads: 2, keyHeads: 2, headDim: 5, valueDim: 3, mask: "causal" },
		{ lengths: [4, 3], queryHeads: 4, keyHeads: 2, headDim: 2, valueDim: 5, mask: "full" },
		{ lengths: [0], queryHeads: 2, keyHeads: 1, headDim: 4, mask: "causal" },
		{ lengths: [], queryHeads: 2, keyHeads: 1, headDim: 4, mask: "full" },
	];
	for (const c of cases) {
		test(label(c), () => {
			const sequences = Sequences.of(device, c.lengths);
			checkGradients(device, {
				inputs: { qkv: { values: inputOf(c), shape: [sum(c.lengths), widthOf(c)] } },
				...(c.sinks && { parameters: { sinks: { values: Float32Array.from(c.sinks), shape: [c.queryHeads] } } }),
				forward: (tape, { qkv }, { sinks }) => attention(tape, qkv!, { ...c, sequences, sinks: sinks ?? null }),
				reference: ({ qkv, sinks }) =>
					referenceAttention(qkv!, {
						...c,
						...(sinks && { sinks }),
						causal: c.mask === "causal",
						scale: c.softmaxScale ?? 1 / Math.sqrt(c.headDim),
					}).o,
			});
			sequences[Symbol.dispose]();
		});
	}

	test("the float64 reference's own gradient", () => {
		const c: Case = { lengths: [4, 2], queryHeads: 2, keyHeads: 1, headDim: 3, mask: "causal" };
		const keep = (token: number, head: number, key: number) => ((token + head + key) % 3 === 0 ? 0 : 1.5);
		const values = Float64Array.from(inputOf(c));
		const weights = outputGradientOf(c);
		const shape = { ...c, causal: true, scale: 0.6, keep };
		const analytic = referenceAttention(values, shape).gradient(weights);
		const loss = () => referenceAttention(values, shape).o.reduce((total, y, i) => total + y * weights[i]!, 0);
		const numeric = values.map((original, i) => {
			values[i] = original + 1e-5;
			const up = loss();
			values[i] = original - 1e-5;
			const down = loss();
			values[i] = original;
			return (up - down) / 2e-5;
		});
		expect(relativeRms(analytic, numeric)).toBeLessThan(1e-8);
	});
});

// Lengths around the kernels' blocks: 64 queries; 256, 128 or 64 keys by head dimension.
const blockCases: Case[] = [
	{ lengths: [300, 63, 1, 0, 64], queryHeads: 2, keyHeads: 1, headDim: 8, mask: "causal" },
	// Windows that end within, at and beyond a block; one that no sequence fills.
	{ lengths: [300, 63, 1, 0, 64], queryHeads: 2, keyHeads: 1, headDim: 8, mask: "causal", window: 20 },
	{ lengths: [600, 31], queryHeads: 2, keyHeads: 1, headDim: 16, mask: "causal", window: 257 },
	{ lengths: [300, 65], queryHeads: 4, keyHeads: 2, headDim: 96, mask: "causal", window: 64 },
	{ lengths: [130, 9], queryHeads: 2, keyHeads: 1, headDim: 80, mask: "causal", window: 130 },
	{ lengths: [200, 0, 65], queryHeads: 4, keyHeads: 2, headDim: 64, mask: "causal", window: 50, sinks: [1, -1, 3, 0] },
	{ lengths: [257, 65], queryHeads: 2, keyHeads: 2, headDim: 32, mask: "full" },
	{ lengths: [131, 64], queryHeads: 2, keyHeads: 2, headDim: 48, valueDim: 32, mask: "causal" },
	{ lengths: [70, 3], queryHeads: 4, keyHeads: 2, headDim: 24, valueDim: 40, mask: "causal" },
	{ lengths: [193, 128], queryHeads: 4, keyHeads: 1, headDim: 40, mask: "causal" },
	{ lengths: [130, 127], queryHeads: 2, keyHeads: 1, headDim: 80, mask: "full" },
	{ lengths: [131, 64], queryHeads: 2, keyHeads: 2, headDim: 96, mask: "causal", softmaxScale: 0.25 },
	// The CUDA library takes head dimensions of at most 256.
	...(process.env.MIMO_TEST_DEVICE === "cuda"
		? []
		: [{ lengths: [97], queryHeads: 1, keyHeads: 1, headDim: 257, mask: "full" } as const]),
	{ lengths: [70, 9], queryHeads: 2, keyHeads: 1, headDim: 16, mask: "causal", padding: 5 },
];

describe("attention across blocks", () => {
	for (const c of blockCases) {
		test(label(c), () => {
			const values = inputOf(c);
			const expected = reference(c, values);
			const got = run(device, c, values);
			expect(relativeRms(got.o, expected.o)).toBeLessThan(2e-6);
			expect(relativeRms(got.gradient, expected.gradient)).toBeLessThan(2e-6);
		});

		test(`${label(c)}: 1 thread gives the same bits as 2`, () => {
			const values = inputOf(c);
			expect(run(oneThread, c, values)).toEqual(run(device, c, values));
		});
	}

	test("scores far apart: the largest probability is 1, the others vanish", () => {
		const c: Case = { lengths: [150], queryHeads: 1, keyHeads: 1, headDim: 8, mask: "causal", softmaxScale: 40 };
		const values = inputOf(c);
		const expected = reference(c, values);
		const got = run(device, c, values);
		expect(relativeRms(got.o, expected.o)).toBeLessThan(1e-4);
		expect(relativeRms(got.gradient, expected.gradient)).toBeLessThan(1e-4);
	});

	test("keys before the window leave no trace, however large their scores", () => {
		const c: Case = { lengths: [200], queryHeads: 1, keyHeads: 1, headDim: 4, mask: "causal", window: 30 };
		const values = inputOf(c);
		// Query 170 sees no key up to 140.
		for (let t = 0; t <= 140; t++) for (let i = 4; i < 12; i++) values[t * 12 + i]! *= 1e3;
		const other = values.slice();
		for (let t = 0; t <= 140; t++) for (let i = 4; i < 12; i++) other[t * 12 + i]! *= -1;
		expect(run(device, c, other).o.subarray(170 * 4)).toEqual(run(device, c, values).o.subarray(170 * 4));
		const expected = reference(c, values);
		const got = run(device, c, values);
		expect(relativeRms(got.o.subarray(170 * 4), expected.o.subarray(170 * 4))).toBeLessThan(2e-6);
		expect(relativeRms(got.gradient.subarray(170 * 12), expected.gradient.subarray(170 * 12))).toBeLessThan(2e-6);
	});

	test("a NaN reaches every output that sees it and no other", () => {
		const c: Case = { lengths: [3, 70], queryHeads: 1, keyHeads: 1, headDim: 4, mask: "causal" };
		const values = inputOf(c);
		values[(3 + 66) * 12 + 4] = Number.NaN; // a key of the second sequence
		const { o } = run(device, c, values);
		for (let t = 0; t < 73; t++) expect(Number.isNaN(o[t * 4]!)).toBe(t >= 3 + 66);
	});
});

describe("attention in bf16", () => {
	for (const c of [blockCases[0]!, blockCases[3]!, blockCases[5]!, blockCases[8]!]) {
		test(label(c), () => {
			using stored = Tensor.from(device, inputOf(c), [sum(c.lengths), widthOf(c)], { dtype: "bf16" });
			using storedGradient = Tensor.from(device, outputGradientOf(c), undefined, { dtype: "bf16" });
			const rounded = stored.toFloat32();
			const expected = referenceAttention(Float64Array.from(rounded), {
				...c,
				causal: c.mask === "causal",
				scale: 1 / Math.sqrt(c.headDim),
			});
			const got = run(device, c, rounded, "bf16");
			// One rounding of the output is 2^-9 at most, 1.7e-3 rms; the gradient also sees o rounded in do·o.
			expect(relativeRms(got.o, expected.o)).toBeLessThan(2.5e-3);
			expect(relativeRms(got.gradient, expected.gradient(storedGradient.toFloat32()))).toBeLessThan(4e-3);
		});
	}
});

describe("attention dropout", () => {
	const seed = 0x123456789abcdef0n;
	/** Factors by the rule of mimo/ops/attention.h, from the uniform numbers of philox_fill. */
	function keepFactors(tokens: number, keys: number, probability: number, place: Required<Place>) {
		using u = Tensor.empty(device, [tokens * place.fullHeads, keys]);
		device.run("philox_fill", {
			y: u,
			rows: tokens * place.fullHeads,
			width: keys,
			first_row: place.firstToken * place.fullHeads,
			first_column: 0,
			full_width: 2 ** 32,
			seed,
			a: 0,
			b: 1,
			distribution: Distribution.uniform,
			dtype: u.dtypeCode,
		});
		const uniform = u.toFloat32();
		return (token: number, head: number, key: number) =>
			uniform[(token * place.fullHeads + place.firstHead + head) * keys + key]! >= Math.fround(probability)
				? 1 / (1 - probability)
				: 0;
	}
	interface Place {
		readonly firstToken?: number;
		readonly firstHead?: number;
		readonly fullHeads?: number;
	}
	const dropped = (c: Case, place: Place = {}): Case => ({
		...c,
		options: { dropout: 0.3, dropoutSeed: seed, ...place },
	});

	for (const c of [
		{ lengths: [270, 3], queryHeads: 2, keyHeads: 1, headDim: 8, mask: "causal" },
		{ lengths: [67, 130], queryHeads: 2, keyHeads: 2, headDim: 96, mask: "full" },
		{ lengths: [270, 3], queryHeads: 2, keyHeads: 1, headDim: 40, mask: "causal", window: 33 },
	] satisfies Case[]) {
		test(`${label(c)}: forward and backward use the documented mask`, () => {
			const place = { firstToken: 1000, firstHead: 2, fullHeads: 6 };
			const values = inputOf(c);
			const keep = keepFactors(sum(c.lengths), Math.max(...c.lengths), 0.3, place);
			const expected = reference(c, values, keep);
			const got = run(device, dropped(c, place), values);
			expect(relativeRms(got.o, expected.o)).toBeLessThan(2e-6);
			expect(relativeRms(got.gradient, expected.gradient)).toBeLessThan(2e-6);
		});
	}

	test("the mask does not depend on what a token is packed with", () => {
		const c: Case = { lengths: [40, 75, 6], queryHeads: 2, keyHeads: 1, headDim: 16, mask: "causal" };
		const values = inputOf(c);
		const together = run(device, dropped(c, { firstToken: 10 }), values).o;
		let token = 0;
		for (const length of c.lengths) {
			const alone = { ...c, lengths: [length] };
			const part = values.subarray(token * widthOf(c), (token + length) * widthOf(c));
			const { o } = run(device, dropped(alone, { firstToken: 10 + token }), part);
			expect(o).toEqual(together.subarray(token * 32, (token + length) * 32));
			token += length;
		}
	});

	test("another seed drops other probabilities, probability 0 none", () => {
		const c: Case = { lengths: [30], queryHeads: 1, keyHeads: 1, headDim: 8, mask: "full" };
		const values = inputOf(c);
		const one = run(device, dropped(c), values).o;
		const other = run(device, { ...c, options: { dropout: 0.3, dropoutSeed: seed + 1n } }, values).o;
		expect(relativeRms(other, one)).toBeGreaterThan(0.1);
		expect(run(device, { ...c, options: { dropout: 0, dropoutSeed: seed } }, values)).toEqual(run(device, c, values));
	});
});

describe("attention refuses", () => {
	test("a projection that does not fit", () => {
		using qkv = Tensor.zeros(device, [4, 20]);
		using sequences = Sequences.of(device, [4]);
		const tape = new Tape(device, { recording: false });
		const options = { queryHeads: 4, keyHeads: 2, headDim: 4, sequences, mask: "causal" } as const;
		expect(() => attention(tape, qkv, options)).toThrow("attention takes a projection [4, 32], not [4, 20].");
		expect(() => attention(tape, qkv, { ...options, queryHeads: 3 })).toThrow(
			"attention cannot share 2 key heads among 3 query heads.",
		);
	});
});
