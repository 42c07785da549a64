import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { Distribution } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

interface Window {
	readonly rows: number;
	readonly width: number;
	readonly firstRow?: number;
	readonly firstColumn?: number;
	readonly fullWidth?: number;
	readonly seed?: number | bigint;
	readonly a?: number;
	readonly b?: number;
}

function fill(distribution: keyof typeof Distribution, window: Window, dtype: "f32" | "bf16" = "f32"): Float32Array {
	using y = Tensor.empty(device, [window.rows, window.width], dtype);
	device.run("philox_fill", {
		y,
		rows: window.rows,
		width: window.width,
		first_row: window.firstRow ?? 0,
		first_column: window.firstColumn ?? 0,
		full_width: window.fullWidth ?? window.width,
		seed: window.seed ?? 0,
		a: window.a ?? 0,
		b: window.b ?? 1,
		distribution: Distribution[distribution],
		dtype: y.dtypeCode,
	});
	return y.toFloat32();
}

/** Philox 4x32-10 written down once more, for counters below 2^32. */
function philox(seed: bigint, counter: number): bigint[] {
	const low = 0xffffffffn;
	let c = [BigInt(counter), 0n, 0n, 0n] as [bigint, bigint, bigint, bigint];
	let [k0, k1] = [seed & low, seed >> 32n];
	for (let round = 0; round < 10; round++) {
		const [p0, p1] = [0xd2511f53n * c[0], 0xcd9e8d57n * c[2]];
		c = [(p1 >> 32n) ^ c[1] ^ k0, p1 & low, (p0 >> 32n) ^ c[3] ^ k1, p0 & low];
		[k0, k1] = [(k0 + 0x9e3779b9n) & low, (k1 + 0xbb67ae85n) & low];
	}
	return c;
}

describe("philox_fill", () => {
	test("uniform numbers are the upper 24 bits of the published vector of counter 0, key 0", () => {
		const words = [...fill("uniform", { rows: 1, width: 4 })].map((u) => (u * 2 ** 24).toString(16));
		expect(words).toEqual(["6627e8", "e169c5", "bc57ac", "9b00db"]);
	});

	test("every element is word i mod 4 of counter i / 4 under a 64-bit seed", () => {
		const seed = 0x123456789abcdef0n;
		const got = fill("uniform", { rows: 1, width: 1030, seed });
		const expected = Float32Array.from(got, (_, i) => Number(philox(seed, i >> 2)[i % 4]! >> 8n) * 2 ** -24);
		expect(got).toEqual(expected);
	});

	test("normal numbers are Box-Muller's of the uniform ones", () => {
		const window = { rows: 1, width: 40000, seed: 77 };
		const u = fill("uniform", window);
		const expected = Float64Array.from(u, (_, i) => {
			const [u0, u1] = [u[i & ~1]!, u[i | 1]!];
			const angle = 2 * Math.PI * u1;
			return Math.sqrt(-2 * Math.log(1 - u0)) * (i % 2 === 0 ? Math.cos(angle) : Math.sin(angle));
		});
		const z = fill("normal", window);
		expect(relativeRms(z, expected)).toBeLessThan(1e-7);
		expect(z.reduce((worst, value, i) => Math.max(worst, Math.abs(value - expected[i]!)), 0)).toBeLessThan(2e-6);
	});

	test("shards are slices of the whole, wherever they are cut", () => {
		const [rows, width] = [9, 1031];
		const whole = fill("normal", { rows, width, seed: 5, b: 0.02 });
		for (const [firstRow, count, firstColumn, columns] of [
			[0, 4, 0, width],
			[4, 5, 0, width],
			[2, 3, 1, 517],
			[0, 9, 518, 513],
			[3, 1, 1030, 1],
		] as const) {
			const shard = fill("normal", {
				rows: count,
				width: columns,
				firstRow,
				firstColumn,
				fullWidth: width,
				seed: 5,
				b: 0.02,
			});
			const slice = shard.map(
				(_, i) => whole[(firstRow + Math.floor(i / columns)) * width + firstColumn + (i % columns)]!,
			);
			expect(shard).toEqual(slice);
		}
	});

	test("mean and standard deviation", () => {
		const n = 400000;
		const moments = (x: Float32Array) => {
			const mean = x.reduce((a, b) => a + b, 0) / n;
			return [mean, Math.sqrt(x.reduce((a, b) => a + (b - mean) ** 2, 0) / n)] as const;
		};
		const [mean, deviation] = moments(fill("normal", { rows: 1, width: n, seed: 11, a: 3, b: 2 }));
		expect(Math.abs(mean - 3)).toBeLessThan(4 * (2 / Math.sqrt(n)));
		expect(Math.abs(deviation - 2)).toBeLessThan(4 * (2 / Math.sqrt(2 * n)));
		const uniform = fill("uniform", { rows: 1, width: n, seed: 12, a: -1, b: 3 });
		expect(Math.abs(moments(uniform)[0] - 1)).toBeLessThan(4 * (4 / Math.sqrt(12 * n)));
		expect(uniform.every((u) => u >= -1 && u < 3)).toBe(true);
	});

	test("the upper end of a uniform range stays outside even where the range is finer than fp32", () => {
		const values = fill("uniform", { rows: 1, width: 4096, a: 2 ** 24, b: 2 ** 24 + 2 });
		expect(values.every((v) => v === 2 ** 24)).toBe(true);
	});

	test("bf16 storage rounds the same numbers; an empty tensor is a no-op", () => {
		const [wide, narrow] = [fill("normal", { rows: 3, width: 50 }), fill("normal", { rows: 3, width: 50 }, "bf16")];
		expect(relativeRms(narrow, wide)).toBeLessThan(3e-3);
		expect(fill("normal", { rows: 0, width: 50 }).length).toBe(0);
	});
});
