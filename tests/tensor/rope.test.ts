import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { type RopeOptions, rope, ropeLast } from "../../src/tensor/ops/rope.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { openDevices } from "./devices.ts";

let device: Device;
let oneThread: Device;
openDevices((two, one) => {
	[device, oneThread] = [two, one];
});

type Case = Omit<RopeOptions, "sequences"> & {
	readonly lengths: readonly number[];
	/** Default: the series of `base`. */
	readonly table?: readonly number[];
};
const tokensOf = (c: Case) => c.lengths.reduce((a, b) => a + b, 0);
const widthOf = (c: Case) => (c.queryHeads + 2 * c.keyHeads) * c.headDim;

/** The formula of docs/spec/language-model.md §3, in float64. */
function reference(x: Float64Array, c: Case): Float64Array {
	const heads = c.queryHeads / c.keyHeads + 2;
	const rotary = Math.floor(c.headDim * c.percent);
	const positions = c.lengths.flatMap((length) => Array.from({ length }, (_, position) => position));
	return x.map((value, index) => {
		const position = positions[Math.floor(index / widthOf(c))]!;
		const head = Math.floor((index % widthOf(c)) / c.headDim) % heads;
		const column = index % c.headDim;
		if (head === heads - 1 || column >= rotary) return value;
		const apart = c.interleaved ? 1 : rotary / 2;
		const pair = c.interleaved ? Math.floor(column / 2) : column % apart;
		const angle = position * (c.table?.[pair] ?? c.base ** ((-2 * pair) / rotary));
		const first = c.interleaved ? column % 2 === 0 : column < apart;
		const partner = first ? -x[index + apart]! : x[index - apart]!;
		return (c.amplitude ?? 1) * (value * Math.cos(angle) + partner * Math.sin(angle));
	});
}

const cases: Case[] = [
	{ lengths: [5, 0, 1, 3], queryHeads: 2, keyHeads: 1, headDim: 4, base: 10000, percent: 1 },
	{ lengths: [6], queryHeads: 4, keyHeads: 2, headDim: 6, base: 100, percent: 0.34 },
	{ lengths: [6, 2], queryHeads: 2, keyHeads: 1, headDim: 6, base: 1, percent: 0.7, table: [0.9, 0.05] },
	{ lengths: [6, 2], queryHeads: 2, keyHeads: 1, headDim: 6, base: 9, percent: 0.7, amplitude: 1.35 },
	{ lengths: [6, 2], queryHeads: 4, keyHeads: 2, headDim: 6, base: 10, percent: 0.7, interleaved: true },
	{ lengths: [3], queryHeads: 1, keyHeads: 1, headDim: 4, base: 10000, percent: 0 },
	{ lengths: [0], queryHeads: 2, keyHeads: 2, headDim: 4, base: 10000, percent: 1 },
];

describe("rope", () => {
	for (const c of cases) {
		test(`lengths ${c.lengths.join(" ")}, ${c.queryHeads}/${c.keyHeads} heads of ${c.headDim}, ${c.percent} of it${c.amplitude ? `, ${c.amplitude} as long` : ""}${c.interleaved ? ", neighbours" : ""}`, () => {
			const sequences = Sequences.of(device, c.lengths);
			using frequencies = c.table ? Tensor.from(device, Float64Array.from(c.table)) : null;
			checkGradients(device, {
				inputs: { qkv: { values: randomValues(tokensOf(c) * widthOf(c), 1), shape: [tokensOf(c), widthOf(c)] } },
				forward: (tape, { qkv }) => rope(tape, qkv!, { ...c, frequencies, sequences }),
				reference: ({ qkv }) => reference(qkv!, c),
			});
			sequences[Symbol.dispose]();
		});
	}

	test.each([false, true])(
		"the last columns of every head turn as those of a narrower head: interleaved %p",
		(interleaved) => {
			const [lengths, heads, kept, rotated] = [[4, 1], 3, 3, 4];
			const c = { lengths, queryHeads: 1, keyHeads: 1, headDim: rotated, base: 10, percent: 1, interleaved };
			using sequences = Sequences.of(device, lengths);
			checkGradients(device, {
				inputs: { x: { values: randomValues(5 * heads * (kept + rotated), 1), shape: [5, heads * (kept + rotated)] } },
				forward: (tape, { x }) => ropeLast(tape, x!, { sequences, base: 10, interleaved, heads, rotated }),
				reference: ({ x }) => {
					const y = Float64Array.from(x!);
					for (let row = 0; row < 5; row++) {
						for (let head = 0; head < heads; head++) {
							const at = (row * heads + head) * (kept + rotated) + kept;
							// The narrower head with a key and a value beside it.
							const fused = new Float64Array(5 * 3 * rotated);
							fused.set(x!.subarray(at, at + rotated), row * 3 * rotated);
							y.set(reference(fused, c).subarray(row * 3 * rotated, row * 3 * rotated + rotated), at);
						}
					}
					return y;
				},
			});
		},
	);

	test("sequences that begin at positions of their own are turned as within a whole sequence", () => {
		const c = cases[0]!;
		const width = widthOf(c);
		const tape = new Tape(device, { recording: false });
		using whole = Tensor.from(device, randomValues(80 * width, 2), [80, width]);
		using one = Sequences.of(device, [80]);
		using turned = rope(tape, whole, { ...c, sequences: one });
		const firsts = [64, 3, 0];
		const lengths = [16, 1, 5];
		const rowsOf = (tensor: Tensor) => {
			const values = tensor.toFloat32();
			return Float32Array.from(
				firsts.flatMap((first, s) => [...values.subarray(first * width, (first + lengths[s]!) * width)]),
			);
		};
		using parts = Tensor.from(device, rowsOf(whole), [22, width]);
		using sequences = Sequences.of(device, lengths);
		using firstPositions = Tensor.from(device, Int32Array.from(firsts));
		using y = rope(tape, parts, { ...c, sequences, firstPositions });
		expect(relativeRms(y.toFloat32(), rowsOf(turned))).toBeLessThan(1e-7);
	});

	const long: Case = { lengths: [9000, 70], queryHeads: 1, keyHeads: 1, headDim: 16, base: 10000, percent: 1 };

	test("positions in the thousands keep their digits", () => {
		const values = randomValues(tokensOf(long) * widthOf(long), 3);
		const outputs = [device, oneThread].map((on) => {
			using qkv = Tensor.from(on, values, [tokensOf(long), widthOf(long)]);
			using sequences = Sequences.of(on, long.lengths);
			using y = rope(new Tape(on, { recording: false }), qkv, { ...long, sequences });
			return y.toFloat32();
		});
		expect(outputs[1]).toEqual(outputs[0]!);
		expect(relativeRms(outputs[0]!, reference(Float64Array.from(values), long))).toBeLessThan(2e-7);
	});

	test("bf16, a window of a wider tensor, and the turn back", () => {
		const c = cases[0]!;
		const width = widthOf(c);
		const tokens = tokensOf(c);
		using whole = Tensor.from(device, randomValues(tokens * (width + 3), 4), [tokens, width + 3], { dtype: "bf16" });
		using window = whole.columns(3, width);
		using qkv = window.withGradient(new GradientSlot(device, [tokens, width], "bf16"));
		using sequences = Sequences.of(device, c.lengths);
		const tape = new Tape(device, { recording: true });
		using y = rope(tape, qkv, { ...c, sequences });
		const x = qkv.toFloat32();
		expect(relativeRms(y.toFloat32(), reference(Float64Array.from(x), c))).toBeLessThan(2.5e-3);
		// The gradient of a rotation turns back: fed its own output, it returns the input, rounded twice.
		y.gradient!.accumulate(y.share());
		tape.backward();
		using gradient = qkv.gradient!.take()!;
		expect(relativeRms(gradient.toFloat32(), x)).toBeLessThan(4e-3);
	});

	test("refuses half a pair of columns", () => {
		using qkv = Tensor.zeros(device, [2, 18]);
		using sequences = Sequences.of(device, [2]);
		const tape = new Tape(device, { recording: false });
		const options = { queryHeads: 1, keyHeads: 1, headDim: 6, base: 10000, percent: 0.5, sequences };
		expect(() => rope(tape, qkv, options)).toThrow("rope turns pairs of columns, not 3 of a head.");
	});
});
