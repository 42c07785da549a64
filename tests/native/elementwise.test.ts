import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { DtypeName } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { axpby, cast, Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

describe("axpby", () => {
	const kinds = ["f32", "bf16"] as const;
	for (const [rows, width] of [
		[0, 3],
		[1, 1],
		[5, 33],
		[260, 130],
	] as const) {
		test(`[${rows}, ${width}], every mix of types, windows and factors`, () => {
			for (const [from, to] of kinds.flatMap((a) => kinds.map((b) => [a, b] as const))) {
				for (const margin of [0, 7]) {
					for (const [alpha, beta] of [
						[1, 0],
						[0.5, 0],
						[2, -1],
						[0, 3],
					] as const) {
						using wideX = Tensor.from(device, randomValues(rows * (width + margin), 1), [rows, width + margin], {
							dtype: from,
						});
						using wideY = Tensor.from(device, randomValues(rows * (width + margin), 2), [rows, width + margin], {
							dtype: to,
						});
						using x = wideX.columns(margin, width);
						using y = wideY.columns(0, width);
						const [xs, ys] = [x.toFloat32(), y.toFloat32()];
						axpby(x, y, alpha, beta);
						const expected = Float64Array.from(xs, (value, i) => alpha * value + beta * ys[i]!);
						expect(relativeRms(y.toFloat32(), expected)).toBeLessThan(to === "f32" ? 1e-7 : 3e-3);
					}
				}
			}
		});
	}

	test("an operand with factor 0 is not read", () => {
		using nan = Tensor.from(device, new Float32Array(5).fill(Number.NaN));
		using y = Tensor.from(device, new Float32Array(5).fill(2));
		axpby(nan, y, 0, 1);
		expect([...y.toFloat32()]).toEqual([2, 2, 2, 2, 2]);
		axpby(y, nan, 1, 0);
		expect([...nan.toFloat32()]).toEqual([2, 2, 2, 2, 2]);
		nan.device.run("fill", { y: nan, elements: 5, value: Number.NaN, dtype: nan.dtypeCode });
		axpby(nan, nan, 0, 0);
		expect([...nan.toFloat32()]).toEqual([0, 0, 0, 0, 0]);
	});

	test("rows past the device-side count are left alone", () => {
		using x = Tensor.from(device, new Float32Array(12).fill(1), [4, 3]);
		using y = Tensor.zeros(device, [4, 3]);
		using count = Tensor.from(device, Int32Array.of(2));
		device.run("axpby", {
			...{ x, y, row_count: count, rows: 4, width: 3, x_stride: 3, y_stride: 3, alpha: 1, beta: 0 },
			x_dtype: x.dtypeCode,
			y_dtype: y.dtypeCode,
		});
		expect([...y.toFloat32()]).toEqual([1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]);
	});

	test("bf16 rounds to nearest, ties to even, and keeps NaN and infinity", () => {
		const ulp = 2 ** -7;
		using x = Tensor.from(
			device,
			Float32Array.of(
				...[1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, -1 - 1.5 * ulp, 3.4e38, 1e-40],
				...[Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, -0],
			),
		);
		using y = cast(x, "bf16");
		expect([...y.toFloat32()]).toEqual([
			...[1, 1 + 2 * ulp, 1 + ulp, -1 - 2 * ulp, Number.POSITIVE_INFINITY, 2 ** -133],
			...[Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, -0],
		]);
	});
});

test("fill writes every storage type", () => {
	const values: [DtypeName, number, number][] = [
		["f32", 0.1, Math.fround(0.1)],
		["bf16", 1 / 3, 0.333984375],
		["i32", -100, -100],
		["u8", 200, 200],
		["f64", 0.1, 0.1],
	];
	for (const [dtype, value, stored] of values) {
		using y = Tensor.zeros(device, [70], dtype);
		device.run("fill", { y, elements: 69, value, dtype: y.dtypeCode });
		using last = y.columns(68, 1);
		using behind = y.columns(69, 1);
		expect([y.item(), last.item(), behind.item()]).toEqual([stored, stored, 0]);
	}
});

test("scale multiplies by a device scalar", () => {
	const values = randomValues(20_001, 1);
	using x = Tensor.from(device, values);
	using factor = Tensor.from(device, Float32Array.of(0.3));
	device.run("scale", { x, factor, elements: x.elements });
	expect(x.toFloat32()).toEqual(values.map((v) => v * Math.fround(0.3)));
});

test("an unknown storage type is refused in one sentence", () => {
	using x = Tensor.zeros(device, [4], "i32");
	expect(() => device.run("add", { a: x, b: x, y: x, elements: 4, dtype: x.dtypeCode })).toThrow(
		"An operation takes f32 or bf16 storage only.",
	);
});
