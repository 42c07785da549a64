import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { columnSum } from "../../src/tensor/ops/linear.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const sum = (values: Iterable<number>) => [...values].reduce((a, b) => a + b, 0);

describe("column_sum", () => {
	for (const [rows, width, stride] of [
		[0, 5, 5],
		[1, 1, 1],
		[131, 33, 40],
		[700, 300, 300],
	] as const) {
		test(`[${rows}, ${width}] rows ${stride} apart adds to what is there`, () => {
			const values = randomValues(rows * stride, 1);
			using wide = Tensor.from(device, values, [rows, stride]);
			using dy = wide.columns(stride - width, width);
			const start = randomValues(width, 2);
			using dbias = Tensor.from(device, start);
			columnSum(device, dy, dbias);
			const column = (c: number) => Array.from({ length: rows }, (_, r) => values[(r + 1) * stride - width + c]!);
			const expected = Float64Array.from(start, (value, c) => value + sum(column(c)));
			expect(relativeRms(dbias.toFloat32(), expected)).toBeLessThan(1e-6);
		});
	}

	test("rows past the device-side count are not read", () => {
		using all = Tensor.from(device, new Float32Array(4 * 3).fill(1).fill(Number.NaN, 6), [4, 3]);
		using count = Tensor.from(device, Int32Array.of(2));
		using dy = all.withRowCount(count);
		using dbias = Tensor.zeros(device, [3]);
		columnSum(device, dy, dbias);
		expect([...dbias.toFloat32()]).toEqual([2, 2, 2]);
	});
});

/** The number that an operation adds to a double that holds 1. */
function added(run: (total: Tensor) => void): number {
	using total = Tensor.from(device, Float64Array.of(1));
	run(total);
	return total.item() - 1;
}

describe("sums of whole buffers", () => {
	for (const elements of [0, 1, 31, 100_003]) {
		test(`${elements} elements`, () => {
			const values = Float64Array.from(randomValues(elements, 3), (x, i) => (i % 5 === 0 ? 0 : x));
			const mask = Float64Array.from(randomValues(elements, 4), (x) => Number(x > 0));
			using x = Tensor.from(device, Float32Array.from(values));
			using maskTensor = Tensor.from(device, Float32Array.from(mask));
			const squares = added((total) => device.run("sum_of_squares", { x, sum: total, elements, dtype: x.dtypeCode }));
			expect(squares).toBeCloseTo(sum(values.map((v) => v * v)), 6);
			expect(added((total) => device.run("count_zeros", { x, count: total, elements }))).toBe(
				sum(values.map((v) => Number(v === 0))),
			);
			using count = Tensor.from(device, Float64Array.of(2));
			const masked = added((total) => device.run("masked_sum", { x, mask: maskTensor, sum: total, count, elements }));
			expect(masked).toBeCloseTo(sum(values.map((v, i) => v * mask[i]!)), 6);
			expect(count.item()).toBe(2 + sum(mask));
			const plain = added((total) => device.run("masked_sum", { x, mask: null, sum: total, count, elements }));
			expect(plain).toBeCloseTo(sum(values), 6);
			expect(count.item()).toBe(2 + sum(mask) + elements);
		});
	}

	test("bf16 squares; the same bits with one thread", async () => {
		const values = randomValues(200_001, 9);
		const squares = (on: Device) => {
			using x = Tensor.from(on, values, [values.length], { dtype: "bf16" });
			using total = Tensor.from(on, Float64Array.of(0));
			on.run("sum_of_squares", { x, sum: total, elements: x.elements, dtype: x.dtypeCode });
			return total.item();
		};
		using single = await testDevice(1);
		expect(squares(device)).toBe(squares(single));
		expect(squares(device)).toBeCloseTo(sum(values.map((v) => v * v)), -2);
	});
});

describe("checksum", () => {
	const mask = (1n << 64n) - 1n;
	/** SplitMix64's mixing of a word and its place. */
	const mixed = (place: number, word: number) => {
		let z = (BigInt(place) * 0x9e3779b97f4a7c15n + BigInt(word)) & mask;
		z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & mask;
		z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & mask;
		return z ^ (z >> 31n);
	};
	const checksumOf = (on: Device, words: Uint32Array, start = 0n) => {
		using x = Tensor.from(on, new Int32Array(words.buffer));
		using total = Tensor.from(on, new Int32Array(BigUint64Array.of(start).buffer));
		on.run("checksum", { x, sum: total, elements: words.length });
		return new BigUint64Array(total.toInt32().buffer)[0]!;
	};

	test.each([0, 1, 31, 70_001])("%d words add to what is there", async (count) => {
		const words = Uint32Array.from(randomValues(count, 5), (value) => value * 2 ** 32);
		const expected = words.reduce((total, word, place) => (total + mixed(place, word)) & mask, mask);
		expect(checksumOf(device, words, mask)).toBe(expected);
		using single = await testDevice(1);
		expect(checksumOf(single, words, mask)).toBe(expected);
	});

	test("every turned bit makes another sum, and so do two words that change places", () => {
		const words = new Uint32Array(new Float32Array(1000).fill(0.5).buffer);
		const sums = new Set([checksumOf(device, words)]);
		for (let bit = 0; bit < 32; bit++) {
			words[517]! ^= 1 << bit;
			sums.add(checksumOf(device, words));
			words[517]! ^= 1 << bit;
		}
		words[3] = 7;
		sums.add(checksumOf(device, words));
		[words[3], words[4]] = [words[4]!, words[3]];
		sums.add(checksumOf(device, words));
		expect(sums.size).toBe(35);
	});
});

describe("find_nonfinite", () => {
	const flagOf = (values: Float32Array, dtype: "f32" | "bf16", start: number) => {
		using x = Tensor.from(device, values, [values.length], { dtype });
		using flag = Tensor.from(device, Int32Array.of(start));
		device.run("find_nonfinite", { x, flag, elements: x.elements, dtype: x.dtypeCode });
		return flag.toInt32()[0];
	};

	for (const dtype of ["f32", "bf16"] as const) {
		test(`${dtype}: a NaN or an infinity anywhere, never a large number`, () => {
			for (const bad of [Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY]) {
				for (const at of [0, 40_000, 70_000]) {
					expect(flagOf(randomValues(70_001, 1).fill(bad, at, at + 1), dtype, 0)).toBe(1);
				}
			}
			expect(flagOf(randomValues(70_001, 1, 3e38), dtype, 0)).toBe(0);
			expect(flagOf(new Float32Array(0), dtype, 0)).toBe(0);
			expect(flagOf(Float32Array.of(1), dtype, 1)).toBe(1);
		});
	}
});
