/** kernel.h's exp_fast, seen through an operation: with lse = 0 and no label, dlogits = exp(logits). */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { crossEntropyBackward } from "../../src/tensor/ops/cross-entropy.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

function exp(x: Float32Array): Float32Array {
	using logits = Tensor.from(device, x, [1, x.length]);
	using label = Tensor.from(device, Int32Array.of(-1));
	using lse = Tensor.from(device, Float32Array.of(0));
	using dloss = Tensor.from(device, Float32Array.of(1));
	const shard = { start: 0, live: x.length };
	crossEntropyBackward(logits, label, lse, dloss, logits, shard, { zLoss: 0, roundBf16: false });
	return logits.toFloat32();
}

/** Distance in units of the last place of the exact value's binade. */
function ulps(actual: number, exact: number): number {
	return Math.abs(actual - exact) / 2 ** (Math.floor(Math.log2(exact)) - 23);
}

const smallestNormal = 2 ** -126;
const largest = (2 - 2 ** -23) * 2 ** 127;

describe("exp_fast", () => {
	test("within 2 ulp wherever the result is a normal number", () => {
		const x = Float32Array.from({ length: 400_000 }, (_, i) => -87.34 + (i * (88.73 + 87.34)) / 400_000);
		const small = Float32Array.from({ length: 1000 }, (_, i) => (i % 2 === 0 ? 1 : -1) * 2 ** (-i / 10));
		let worst = 0;
		for (const values of [x, small]) {
			const y = exp(values);
			values.forEach((value, i) => {
				const exact = Math.exp(value);
				if (exact >= smallestNormal && exact <= largest) worst = Math.max(worst, ulps(y[i]!, exact));
			});
		}
		expect(worst).toBeLessThan(2);
	});

	test("finite up to the largest number, then infinity; below the smallest normal one 0, or on a GPU right; NaN stays", () => {
		const [tooLarge, largestArgument] = [Math.fround(88.7228394), Math.fround(88.7228317)];
		expect(Math.exp(tooLarge)).toBeGreaterThan(largest);
		expect(Math.exp(largestArgument)).toBeLessThan(largest);
		const y = exp(
			Float32Array.of(
				...[largestArgument, tooLarge, 1e30, Number.POSITIVE_INFINITY],
				...[-87.4, -1e30, Number.NEGATIVE_INFINITY, Number.NaN, 0, -0],
			),
		);
		expect(y[0]!).toBeGreaterThan(3.4e38);
		expect(y[0]!).toBeLessThan(Number.POSITIVE_INFINITY);
		const infinity = Number.POSITIVE_INFINITY;
		const small = device.library.kind === "cpu" ? 0 : Math.exp(Math.fround(-87.4));
		expect(Math.abs(y[4]! - small)).toBeLessThanOrEqual(1e-5 * small);
		expect([...y.subarray(1, 4), ...y.subarray(5)]).toEqual([infinity, infinity, infinity, 0, 0, Number.NaN, 1, 1]);
	});
});
