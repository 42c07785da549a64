import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { Distribution } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { dropout } from "../../src/tensor/ops/dropout.ts";
import { TokenSlice } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** Uniform numbers of a [rows, width] tensor under a seed. */
function uniforms(rows: number, width: number, seed: number): Float32Array {
	using u = Tensor.empty(device, [rows, width]);
	device.run("philox_fill", {
		...{ y: u, rows, width, first_row: 0, first_column: 0, full_width: width, seed, a: 0, b: 1 },
		distribution: Distribution.uniform,
		dtype: u.dtypeCode,
	});
	return u.toFloat32();
}

describe("dropout", () => {
	test("keeps what philox keeps, scaled; its backward has the same mask", () => {
		const [rows, width, probability, seed] = [7, 13, 0.3, 42];
		const mask = uniforms(rows, width, seed).map((u) => Number(u >= Math.fround(probability)));
		checkGradients(device, {
			inputs: { x: { values: randomValues(rows * width, 1), shape: [rows, width] } },
			forward: (tape, { x }) => dropout(tape, x!, { probability, seed }),
			reference: ({ x }) => x!.map((value, i) => (value * mask[i]!) / (1 - probability)),
		});
	});

	test("the mask does not depend on how tokens and columns are cut", () => {
		const [rows, width] = [12, 37];
		const tape = new Tape(device, { recording: false });
		const ones = (r: number, w: number) => Tensor.from(device, new Float32Array(r * w).fill(1), [r, w]);
		using all = ones(rows, width);
		const options = { probability: 0.5, seed: 9 };
		using whole = dropout(tape, all, options);
		const expected = whole.toFloat32();
		for (const [firstRow, r, firstColumn, w] of [
			[0, 5, 0, 37],
			[5, 7, 0, 37],
			[3, 4, 11, 26],
			[11, 1, 36, 1],
		] as const) {
			using part = ones(r, w);
			using y = dropout(tape, part, {
				...options,
				rows: TokenSlice.of(firstRow, part.rows),
				firstColumn,
				fullWidth: width,
			});
			const slice = part.toFloat32().map((_, i) => {
				return expected[(firstRow + Math.floor(i / w)) * width + firstColumn + (i % w)]!;
			});
			expect(y.toFloat32()).toEqual(slice);
		}
	});

	test("rows of several runs of tokens have the masks of those tokens", () => {
		const [width, options] = [5, { probability: 0.5, seed: 9 }];
		const tape = new Tape(device, { recording: false });
		const ones = (rows: number) => Tensor.from(device, new Float32Array(rows * width).fill(1), [rows, width]);
		using all = ones(12);
		using whole = dropout(tape, all, options);
		const rows = new TokenSlice([
			{ first: 8, count: 3 },
			{ first: 1, count: 2 },
		]);
		using part = ones(rows.count);
		using y = dropout(tape, part, { ...options, rows });
		const expected = whole.toFloat32();
		expect([...y.toFloat32()]).toEqual(
			[8, 9, 10, 1, 2].flatMap((row) => [...expected.subarray(row * width, (row + 1) * width)]),
		);
		expect(rows.cut({ rank: 1, size: 5 }).ranges).toEqual([{ first: 9, count: 1 }]);
		expect(rows.rows(2, 2).ranges).toEqual([
			{ first: 10, count: 1 },
			{ first: 1, count: 1 },
		]);
	});

	test("drops the wanted share", () => {
		const n = 200_000;
		using x = Tensor.from(device, new Float32Array(n).fill(1), [1, n], { dtype: "bf16" });
		using y = dropout(new Tape(device, { recording: false }), x, { probability: 0.1, seed: 3 });
		const dropped = y.toFloat32().reduce((count, value) => count + Number(value === 0), 0);
		expect(Math.abs(dropped - 0.1 * n)).toBeLessThan(4 * Math.sqrt(0.1 * 0.9 * n));
	});

	test("probability 0 is the value itself, no elements are no work", () => {
		const tape = new Tape(device, { recording: false });
		using x = Tensor.from(device, randomValues(4, 1), [2, 2]);
		using same = dropout(tape, x, { probability: 0, seed: 1 });
		expect(same.allocation).toBe(x.allocation);
		using none = Tensor.empty(device, [0, 5]);
		using y = dropout(tape, none, { probability: 0.5, seed: 1 });
		expect(y.elements).toBe(0);
	});
});
