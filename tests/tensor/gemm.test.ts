import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { gemm } from "../../src/tensor/ops/linear.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { sanitized } from "../sanitizer.ts";
import { randomValues, relativeRms, testDevice } from "../support.ts";
import { openDevices } from "./devices.ts";
import { type Case, difference, expectedOf, operandsOf, run } from "./gemm-reference.ts";

let device: Device;
let oneThread: Device;
openDevices((two, one) => {
	[device, oneThread] = [two, one];
});

function check(c: Case): void {
	const operands = operandsOf(c);
	const got = run(device, c, operands);
	// Products in f32: sums of k terms; a bf16 result is rounded once more, cuBLASLt's with a bias twice.
	const rounded = device.library.kind === "cpu" || !c.bias ? 2.5e-3 : 3.5e-3;
	expect(difference(got, expectedOf(c, operands))).toBeLessThan(c.dtypes?.[2] === "bf16" ? rounded : 1e-6);
	expect(difference(run(oneThread, c, operands), got)).toBeLessThan(1e-6);
}

const both = [false, true];
/** Transposes of a and b in large products; under the sanitizers two, which pack each operand in each way. */
const transposes = [
	[false, true],
	[true, false],
	...(sanitized
		? []
		: [
				[false, false],
				[true, true],
			]),
] as const;
const types = ["f32", "bf16"] as const;

describe("gemm", () => {
	for (const transposeA of both) {
		for (const transposeB of both) {
			test(`every storage type and option, transposes ${Number(transposeA)}${Number(transposeB)}`, () => {
				for (const aType of types) {
					for (const bType of types) {
						for (const cType of types) {
							for (const [alpha, beta] of [
								[1, 0],
								[0.5, 1],
								[-1.25, 0.75],
							]) {
								for (const bias of both) {
									check({
										m: 13,
										n: 19,
										k: 23,
										batch: 3,
										gap: 2,
										transposeA,
										transposeB,
										dtypes: [aType, bType, cType],
										alpha: alpha!,
										beta: beta!,
										bias,
									});
								}
							}
						}
					}
				}
			});
		}
	}

	test("sizes around register tiles, vectors and single rows or columns", () => {
		const sizes = [1, 2, 15, 16, 17, 33, 65];
		for (const [i, m] of sizes.entries()) {
			for (const [j, n] of sizes.entries()) {
				const k = sizes[(3 * i + 2 * j) % sizes.length]!;
				check({ m, n, k, transposeA: i % 2 === 0, transposeB: j % 2 === 0, gap: (i + j) % 3 });
			}
		}
	});

	test("widths around panels of registers, sums longer than a panel, with every factor", () => {
		for (const [i, n] of [24, 40, 47, 48, 49, 64, 97].entries()) {
			for (const [j, k] of [127, 128, 129, 300].entries()) {
				const stored = { transposeA: j % 2 === 0, transposeB: i % 2 === 0 };
				check({ m: 41 + j, n, k, ...stored, gap: 1, alpha: -1.25, beta: 0.75 });
				check({ m: 21, n, k, ...stored });
			}
		}
	});

	test("widths around two panels and more, with a matrix past the caches", () => {
		const k = 353;
		for (const [i, n] of [95, 96, 97, 111, 113, 145, 192, 225].entries()) {
			for (const [transposeA, transposeB] of transposes) {
				check({ m: 7 + i, n, k, transposeA, transposeB, gap: 3, beta: i % 2 });
				check({ m: 21, n, k, transposeA, transposeB, beta: 1 - (i % 2) });
			}
		}
		check({ m: 1030, n: 161, k, gap: 1, beta: 1 });
		check({ m: 1030, n: 97, k, transposeB: true });
	});

	test("few rows with a matrix as it is stored: every storage type and option", () => {
		for (const m of [1, 2, 3, 4, 7, 16, 17]) {
			for (const [n, k] of [
				[1, 5],
				[19, 33],
				[130, 64],
			] as const) {
				for (const bType of types) {
					const dtypes = [m % 2 === 0 ? "f32" : "bf16", bType, n % 2 === 0 ? "bf16" : "f32"] as const;
					check({ m, n, k, transposeB: true, gap: m % 3, dtypes });
					check({ m, n, k, transposeB: true, gap: 1, dtypes, alpha: -1.25, beta: 0.75, bias: true });
				}
			}
		}
	});

	test("a row has the same bits whatever rows are beside it", () => {
		if (device.library.kind !== "cpu") return;
		const [rows, n, k] = [16, 77, 203];
		for (const dtype of types) {
			using a = Tensor.from(device, randomValues(rows * k, 1), [rows, k], { dtype });
			using b = Tensor.from(device, randomValues(n * k, 2), [n, k], { dtype });
			const product = (first: number, count: number) => {
				using own = a.rowsFrom(first, count);
				using c = Tensor.empty(device, [count, n]);
				gemm(device, { tensor: own, transposed: false }, { tensor: b, transposed: true }, c);
				return c.toFloat32();
			};
			const all = product(0, rows);
			for (const [first, count] of [
				[0, 1],
				[3, 2],
				[5, 7],
				[15, 1],
			] as const) {
				expect(product(first, count)).toEqual(all.slice(first * n, (first + count) * n));
			}
		}
	});

	test("empty sides: no rows, no columns, nothing to sum, no products", () => {
		for (const dtype of types) {
			const dtypes = [dtype, dtype, dtype] as const;
			for (const [m, n] of [
				[0, 4],
				[4, 0],
				[0, 0],
			]) {
				check({ m: m!, n: n!, k: 3, dtypes, gap: 1 });
			}
			for (const beta of [0, 0.5]) {
				for (const bias of both) check({ m: 3, n: 4, k: 0, dtypes, beta, bias, gap: 1 });
			}
			check({ m: 3, n: 4, k: 5, batch: 0, dtypes });
		}
	});

	test("a batch that shares one operand, smaller and larger than the threads' share", () => {
		for (const batch of [2, 11]) {
			check({ m: 7, n: 9, k: 5, batch, sharedB: true, dtypes: ["bf16", "bf16", "f32"] });
			check({ m: 7, n: 9, k: 5, batch, sharedB: true, transposeB: true, gap: 3 });
		}
		check({ m: 100, n: 110, k: 120, batch: 2 });
		check({ m: 100, n: 110, k: 120, batch: 9, transposeA: true });
	});

	test("sums by panels are the same on one thread as on several", () => {
		for (const [m, n, k] of [
			[1030, 261, 353],
			[512, 1300, 256],
			[518, 200, 700],
		] as const) {
			for (const [transposeA, transposeB] of transposes) {
				const c: Case = { m, n, k, transposeA, transposeB, gap: 1, beta: 1 };
				const operands = operandsOf(c);
				const [alone, shared] = [oneThread, device].map((on) => Buffer.from(run(on, c, operands).buffer));
				expect(alone!.equals(shared!)).toBe(true);
			}
		}
	});

	// Shared between threads, past the limits of products without packing, several panels in every direction.
	for (const [m, n, k] of [
		[517, 193, 801],
		[130, 1027, 391],
		[259, 261, 1500],
	] as const) {
		for (const [transposeA, transposeB] of transposes) {
			test(`[${m}, ${k}] · [${k}, ${n}], transposes ${Number(transposeA)}${Number(transposeB)}`, () => {
				check({ m, n, k, transposeA, transposeB, gap: 1, beta: 1 });
			});
		}
	}

	test.skipIf(sanitized)("a large product, at a sample of places", () => {
		const c: Case = { m: 1101, n: 1299, k: 2103, transposeB: true };
		const operands = operandsOf(c);
		const places = Array.from({ length: 3000 }, (_, i) => (i * 7919 * 61) % (c.m * c.n));
		const expected = places.map((at) => {
			const [aRow, bRow] = [operands.a.offset(0, Math.floor(at / c.n)), operands.b.offset(0, at % c.n)];
			let sum = 0;
			for (let l = 0; l < c.k; l++) sum += operands.a.values[aRow + l]! * operands.b.values[bRow + l]!;
			return sum;
		});
		for (const on of [device, oneThread]) {
			const got = run(on, c, operands);
			expect(
				relativeRms(
					Float32Array.from(places, (at) => got[at]!),
					expected,
				),
			).toBeLessThan(1e-6);
		}
	});

	test("results do not depend on the number of threads", async () => {
		using five = await testDevice(5);
		// Some lie around the size up to which OpenBLAS adds in another order.
		for (const [m, n, k] of [
			[1024, 8, 128],
			[8, 1100, 130],
			[513, 64, 61],
			[300, 300, 300],
			[70, 1000, 17],
		] as const) {
			const product = (on: Device) => {
				using a = Tensor.from(on, randomValues(m * k, 1), [m, k]);
				using b = Tensor.from(on, randomValues(n * k, 2), [n, k]);
				using c = Tensor.from(on, randomValues(m * n, 3), [m, n]);
				gemm(on, { tensor: a, transposed: false }, { tensor: b, transposed: true }, c, { beta: 1 });
				return c.toFloat32();
			};
			const expected = product(oneThread);
			expect(product(device)).toEqual(expected);
			expect(product(five)).toEqual(expected);
		}
	});

	test("NaN and infinity pass through", () => {
		for (const dtype of types) {
			using a = Tensor.from(device, Float32Array.of(1, Number.NaN, 2, 3, Number.POSITIVE_INFINITY, 1), [3, 2], {
				dtype,
			});
			using c = Tensor.empty(device, [3, 1], dtype);
			using b = Tensor.from(device, Float32Array.of(1, 1), [2, 1], { dtype });
			device.run("gemm", {
				...{ a, b, c, bias: null, m: 3, n: 1, k: 2, a_stride: 2, b_stride: 1, c_stride: 1 },
				...{ batch: 1, a_batch_stride: 0, b_batch_stride: 0, c_batch_stride: 0, alpha: 1, beta: 0 },
				...{
					beside_collective: 0,
					transpose_a: 0,
					transpose_b: 0,
					a_dtype: a.dtypeCode,
					b_dtype: a.dtypeCode,
					c_dtype: a.dtypeCode,
				},
			});
			expect([...c.toFloat32()]).toEqual([Number.NaN, 5, Number.POSITIVE_INFINITY]);
		}
	});

	test("refuses rows that overlap", () => {
		using x = Tensor.zeros(device, [16]);
		const sizes = { m: 2, n: 4, k: 4, a_stride: 4, b_stride: 4, c_stride: 3 };
		expect(() =>
			device.run("gemm", {
				...{ a: x, b: x, c: x, bias: null, ...sizes },
				...{ batch: 1, a_batch_stride: 0, b_batch_stride: 0, c_batch_stride: 0, alpha: 1, beta: 0 },
				...{ beside_collective: 0, transpose_a: 0, transpose_b: 0, a_dtype: 0, b_dtype: 0, c_dtype: 0 },
			}),
		).toThrow("gemm needs");
	});
});
