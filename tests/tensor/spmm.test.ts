import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { pickRows, SparseMatrix, type SparseRows, spmm } from "../../src/tensor/ops/spmm.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** Row r has r mod 4 entries, at columns that repeat. */
function someMatrix(rows: number, columns: number): SparseRows {
	const offsets = new Int32Array(rows + 1);
	const column: number[] = [];
	for (let row = 0; row < rows; row++) {
		for (let entry = 0; entry < row % 4; entry++) column.push((row * 7 + entry * 3) % columns);
		offsets[row + 1] = column.length;
	}
	return { columns, offsets, column: Int32Array.from(column), value: randomValues(column.length, 9) };
}

function dense(matrix: SparseRows, x: Float64Array, width: number, base?: Float64Array): Float64Array {
	const rows = matrix.offsets.length - 1;
	const y = base ? base.slice() : new Float64Array(rows * width);
	for (let row = 0; row < rows; row++) {
		for (let entry = matrix.offsets[row]!; entry < matrix.offsets[row + 1]!; entry++) {
			const value = matrix.value?.[entry] ?? 1;
			for (let c = 0; c < width; c++) y[row * width + c]! += value * x[matrix.column[entry]! * width + c]!;
		}
	}
	return y;
}

describe("spmm", () => {
	for (const [rows, columns, width] of [
		[9, 5, 3],
		[40, 17, 33],
		[0, 4, 5],
	] as const) {
		test(`[${rows}, ${columns}] times [${columns}, ${width}]: value and gradient`, () => {
			const host = someMatrix(rows, columns);
			using matrix = new SparseMatrix(device, host);
			expect(matrix.transposed.rows).toBe(columns);
			checkGradients(device, {
				inputs: { x: { values: randomValues(columns * width, 1), shape: [columns, width] } },
				forward: (tape, { x }) => spmm(tape, matrix, x!),
				reference: ({ x }) => dense(host, x!, width),
			});
		});
	}

	test("added to a base, of a parameter, seen under another shape", () => {
		const host = someMatrix(6, 4);
		using matrix = new SparseMatrix(device, host);
		expect(matrix.transposed.rows).toBe(4);
		checkGradients(device, {
			inputs: { base: { values: randomValues(18, 3), shape: [2, 9] } },
			parameters: { table: { values: randomValues(12, 4), shape: [1, 4, 3] } },
			forward: (tape, { base }, { table }) => spmm(tape, matrix, table!, { base: base!, shape: [2, 9] }),
			reference: ({ base, table }) => dense(host, table!, 3, base!),
		});
	});

	test("rows wider than one block of sums", () => {
		const host = someMatrix(3, 2);
		using matrix = new SparseMatrix(device, host);
		const values = randomValues(2 * 2100, 2);
		using x = Tensor.from(device, values, [2, 2100]);
		using y = spmm(new Tape(device, { recording: false }), matrix, x);
		expect(relativeRms(y.toFloat32(), dense(host, Float64Array.from(values), 2100))).toBeLessThan(1e-6);
	});

	test("bf16: picked rows are exact copies, −1 gives zeros", () => {
		using matrix = new SparseMatrix(device, pickRows([2, -1, 0, 2], 3));
		using x = Tensor.from(device, randomValues(15, 5), [3, 5], { dtype: "bf16" });
		using y = spmm(new Tape(device, { recording: false }), matrix, x);
		const rows = x.toFloat32();
		const row = (index: number) => [...rows.subarray(index * 5, index * 5 + 5)];
		expect([...y.toFloat32()]).toEqual([...row(2), 0, 0, 0, 0, 0, ...row(0), ...row(2)]);
	});

	test("a picked row that does not exist, and shapes that do not fit, are refused", () => {
		expect(() => pickRows([0, 3], 3)).toThrow("There is no row 3 to pick.");
		using matrix = new SparseMatrix(device, pickRows([0, 1], 2));
		using x = Tensor.zeros(device, [3, 2]);
		expect(() => spmm(new Tape(device, { recording: false }), matrix, x)).toThrow("A sparse [2, 2] cannot turn [3,2]");
	});
});
