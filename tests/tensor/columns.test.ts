import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { joinColumns, reshape, splitColumns } from "../../src/tensor/ops/columns.ts";
import { rmsNorm } from "../../src/tensor/ops/rms-norm.ts";
import type { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { axpby, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const rows = 4;
const sizes = [3, 5, 2];

function input(): Tensor {
	using plain = Tensor.from(device, randomValues(rows * 10, 1), [rows, 10]);
	return plain.withGradient(new GradientSlot(device, plain.shape, "f32"));
}

/** Fills the gradient of `part` as an operation does: computes into the target, hands it back. */
function send(part: Tensor, value: number): Tensor {
	const target = part.gradient!.target();
	axpby(target, target, 0, 0);
	using constant = Tensor.from(device, new Float32Array(part.elements).fill(value), part.shape);
	part.gradient!.accumulate(target);
	part.gradient!.accumulate(constant.share());
	return target;
}

const expectedRow = (...values: number[]) => sizes.flatMap((size, i) => new Array<number>(size).fill(values[i]!));

describe("splitColumns", () => {
	test("gradients of a consumed part, norm over a window", () => {
		checkGradients(device, {
			inputs: { x: { values: randomValues(rows * 10, 1), shape: [rows, 10] } },
			parameters: { weight: { values: randomValues(5, 2), shape: [5] } },
			forward: (tape, { x }, { weight }) => {
				const [a, b, c] = splitColumns(tape, x!, sizes);
				using first = a!;
				using middle = b!;
				using last = c!;
				expect([first.width, middle.width, last.width]).toEqual(sizes);
				return rmsNorm(tape, middle, weight as Parameter, 1e-5);
			},
			reference: ({ x, weight }) => {
				const y = new Float64Array(rows * 5);
				for (let t = 0; t < rows; t++) {
					const part = x!.subarray(t * 10 + 3, t * 10 + 8);
					const mean = part.reduce((sum, v) => sum + v * v, 0) / 5;
					for (let i = 0; i < 5; i++) y[t * 5 + i] = (part[i]! / Math.sqrt(mean + 1e-5)) * weight![i]!;
				}
				return y;
			},
		});
	});

	test("every part's gradient lands in one buffer, which becomes the whole's gradient", () => {
		using x = input();
		const tape = new Tape(device, { recording: true });
		const parts = splitColumns(tape, x, sizes);
		const targets = parts.map((part, i) => send(part, i + 1));
		expect(new Set(targets.map((target) => target.allocation)).size).toBe(1);
		const { allocation } = targets[0]!;
		tape.backward();
		using gradient = x.gradient!.take()!;
		expect(gradient.allocation).toBe(allocation);
		expect(allocation.references).toBe(1);
		expect([...gradient.toFloat32().subarray(0, 10)]).toEqual(expectedRow(1, 2, 3));
		for (const part of parts) part[Symbol.dispose]();
	});

	test("parts of parts share the same buffer", () => {
		using x = input();
		const tape = new Tape(device, { recording: true });
		const [head, tail] = splitColumns(tape, x, [3, 7]);
		using a = head!;
		using rest = tail!;
		const [middle, end] = splitColumns(tape, rest, [5, 2]);
		using b = middle!;
		using c = end!;
		const targets = [a, b, c].map((part, i) => send(part, i + 4));
		expect(new Set(targets.map((target) => target.allocation)).size).toBe(1);
		tape.backward();
		using gradient = x.gradient!.take()!;
		expect([...gradient.toFloat32().subarray(30)]).toEqual(expectedRow(4, 5, 6));
	});

	test("a part without gradient gives zeros, a gradient made elsewhere is copied, sums stay in place", () => {
		using x = input();
		const tape = new Tape(device, { recording: true });
		const parts = splitColumns(tape, x, sizes);
		using elsewhere = Tensor.from(device, new Float32Array(rows * 3).fill(7), [rows, 3]);
		parts[0]!.gradient!.accumulate(elsewhere.share());
		send(parts[2]!, 1);
		send(parts[2]!, 2);
		tape.backward();
		using gradient = x.gradient!.take()!;
		expect([...gradient.toFloat32().subarray(10, 20)]).toEqual(expectedRow(7, 0, 3));
		expect([...elsewhere.toFloat32()]).toEqual(new Array(12).fill(7));
		for (const part of parts) part[Symbol.dispose]();
	});

	test("a kernel that cannot write strided rows leaves the window free for one that can", () => {
		using x = input();
		const tape = new Tape(device, { recording: true });
		const parts = splitColumns(tape, x, sizes);
		const besides = parts[1]!.gradient!.contiguousTarget();
		expect(besides.contiguous).toBe(true);
		device.copyToDevice(besides, new Float32Array(rows * 5).fill(2));
		parts[1]!.gradient!.accumulate(besides);
		send(parts[1]!, 1);
		tape.backward();
		using gradient = x.gradient!.take()!;
		expect([...gradient.toFloat32().subarray(0, 10)]).toEqual(expectedRow(0, 3, 0));
		for (const part of parts) part[Symbol.dispose]();
	});

	test("adds to a gradient the whole already has", () => {
		using x = input();
		const tape = new Tape(device, { recording: true });
		const parts = splitColumns(tape, x, sizes);
		x.gradient!.accumulate(Tensor.from(device, new Float32Array(rows * 10).fill(10), [rows, 10]));
		for (const part of parts) send(part, 1);
		tape.backward();
		using gradient = x.gradient!.take()!;
		expect([...gradient.toFloat32().subarray(0, 10)]).toEqual(new Array(10).fill(11));
		for (const part of parts) part[Symbol.dispose]();
	});

	test("nothing is left behind by a discarded tape, nothing allocated without one", () => {
		const before = device.memoryStatistics().liveBytes;
		{
			using x = input();
			const tape = new Tape(device, { recording: true });
			const parts = splitColumns(tape, x, sizes);
			send(parts[1]!, 1);
			tape.discard();
			const plain = splitColumns(new Tape(device, { recording: false }), x, sizes);
			expect(plain.every((part) => part.gradient === null && part.allocation === x.allocation)).toBe(true);
			for (const part of [...parts, ...plain]) part[Symbol.dispose]();
		}
		expect(device.memoryStatistics().liveBytes).toBe(before);
	});

	test("refuses parts that do not make up the whole", () => {
		using x = input();
		expect(() => splitColumns(new Tape(device, { recording: true }), x, [3, 5])).toThrow(
			"Parts of 3 + 5 columns do not make up 10.",
		);
	});
});

describe("joinColumns", () => {
	test("parts stand side by side, and each gets its columns of the gradient", () => {
		checkGradients(device, {
			inputs: {
				a: { values: randomValues(rows * 2, 1), shape: [rows, 2] },
				b: { values: randomValues(rows * 4, 2), shape: [rows, 4] },
			},
			parameters: {},
			forward: (tape, { a, b }) => joinColumns(tape, [a!, b!]),
			reference: ({ a, b }) =>
				Float64Array.from({ length: rows * 6 }, (_, at) => {
					const [row, column] = [Math.floor(at / 6), at % 6];
					return column < 2 ? a![row * 2 + column]! : b![row * 4 + column - 2]!;
				}),
		});
	});
});

test("reshape has the same values, and the gradient of a window of them", () => {
	checkGradients(device, {
		inputs: { x: { values: randomValues(rows * 6, 1), shape: [rows, 6] } },
		parameters: {},
		forward: (tape, { x }) => {
			using narrow = reshape(tape, x!, [3 * rows, 2]);
			const [first, last] = splitColumns(tape, narrow, [1, 1]);
			using _first = first!;
			return last!;
		},
		reference: ({ x }) => Float64Array.from({ length: rows * 3 }, (_, at) => x![2 * at + 1]!),
	});
});
