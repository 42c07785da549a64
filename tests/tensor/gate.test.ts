import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { joinColumns, splitColumns } from "../../src/tensor/ops/columns.ts";
import { gated, splitGate } from "../../src/tensor/ops/gate.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

for (const [kind, gateOf] of [
	["sigmoid", (g: number) => 1 / (1 + Math.exp(-g))],
	["silu", (g: number) => g / (1 + Math.exp(-g))],
] as const) {
	for (const [rows, width] of [
		[5, 3],
		[40, 9],
		[0, 4],
	] as const) {
		test(`${kind}, ${rows} x ${width}, by a window of columns`, () => {
			checkGradients(device, {
				inputs: {
					x: { values: randomValues(rows * width, 1), shape: [rows * width, 1] },
					z: { values: randomValues(rows * (width + 2), 2, 2), shape: [rows, width + 2] },
				},
				forward: (tape, { x, z }) => {
					const [left, right] = splitColumns(tape, z!, [2, width]);
					using unused = left!;
					using gate = right!;
					expect(unused.width).toBe(2);
					return gated(tape, x!, gate, kind);
				},
				reference: ({ x, z }) =>
					x!.map((value, i) => value * gateOf(z![Math.floor(i / width) * (width + 2) + 2 + (i % width)]!)),
			});
		});
	}
}

test("refuses a gate of another shape", () => {
	const tape = new Tape(device, { recording: false });
	using x = Tensor.zeros(device, [2, 3]);
	using gate = Tensor.zeros(device, [2, 4]);
	expect(() => gated(tape, x, gate, "silu")).toThrow("A gate of f32 [2,4] does not fit f32 [2,3].");
});

test("splitGate: queries, keys and values of every key head, and the gates, in whose order they come", () => {
	const heads = { queryHeads: 4, keyHeads: 2, headDim: 3 };
	const [tokens, group] = [5, 6 * 3];
	checkGradients(device, {
		inputs: { x: { values: randomValues(tokens * 2 * group, 1), shape: [tokens, 2 * group] } },
		forward: (tape, { x }) => {
			const [qkv, gate] = splitGate(tape, x!, heads);
			using first = qkv;
			using second = gate;
			return joinColumns(tape, [first, second]);
		},
		reference: ({ x }) => {
			const rows = Array.from({ length: tokens }, (_, t) => {
				const groups = [0, 1].map((g) => [...x!.subarray((2 * t + g) * group, (2 * t + g + 1) * group)]);
				const qkv = groups.flatMap((own) => [...own.slice(0, 6), ...own.slice(12)]);
				return [...qkv, ...groups.flatMap((own) => own.slice(6, 12))];
			});
			return Float64Array.from(rows.flat());
		},
	});
});

test("splitGate: parts without a gradient get zeros", () => {
	using plain = Tensor.from(device, randomValues(2 * 8, 1), [2, 8]);
	using x = plain.withGradient(new GradientSlot(device, plain.shape, "f32"));
	const tape = new Tape(device, { recording: true });
	const [qkv, gate] = splitGate(tape, x, { queryHeads: 1, keyHeads: 1, headDim: 2 });
	using first = qkv;
	using second = gate;
	second.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 2, 3, 4), [2, 2]));
	tape.backward();
	using dx = x.gradient!.take()!;
	expect([...dx.toFloat32()]).toEqual([0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0, 0, 0]);
	expect(first.width).toBe(6);
});
