import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import {
	CrossEntropyStatistics,
	crossEntropy,
	crossEntropyBackward,
	crossEntropyLoss,
	crossEntropyStatistics,
} from "../../src/tensor/ops/cross-entropy.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { roundToBf16, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** Cross-entropy in float64. A label outside counts as a logit equal to the maximum. */
function reference(logits: Float64Array, labels: Int32Array, width: number, live: number, zLoss: number): Float64Array {
	return Float64Array.from(labels, (label, t) => {
		const row = logits.subarray(t * width, t * width + live);
		const maximum = row.reduce((a, b) => Math.max(a, b), Number.NEGATIVE_INFINITY);
		const lse = maximum + Math.log(row.reduce((sum, l) => sum + Math.exp(l - maximum), 0));
		return lse - (row[label] ?? maximum) + zLoss * lse ** 2;
	});
}

function someLabels(tokens: number, live: number): Int32Array {
	return Int32Array.from({ length: tokens }, (_, t) => (t === 1 ? -100 : (t * 7919) % live));
}

/** Logits with a gradient slot; the plain tensor is gone, so the tape alone can hold them. */
function someLogits(tokens: number, width: number, scale = 4): Tensor {
	using plain = Tensor.from(device, randomValues(tokens * width, 1, scale), [tokens, width]);
	return plain.withGradient(new GradientSlot(device, [tokens, width], "f32"));
}

describe("crossEntropy", () => {
	for (const [tokens, width, live, zLoss] of [
		[5, 7, 7, 0],
		[3, 40, 37, 0],
		[4, 33, 32, 1e-2],
		[2, 2100, 2099, 0],
		[0, 16, 16, 0],
	] as const) {
		test(`${tokens} tokens, ${live} of ${width} columns, z-loss ${zLoss}`, () => {
			// Left out: labels of -100, at which the loss has a maximum and backward does not give its derivative.
			const labels = someLabels(tokens, live).map((label) => Math.max(label, 0));
			using labelTensor = Tensor.from(device, labels);
			checkGradients(device, {
				inputs: { logits: { values: randomValues(tokens * width, 1, 4), shape: [tokens, width] } },
				forward: (tape, { logits }) => crossEntropy(tape, logits!, labelTensor, { shard: { start: 0, live }, zLoss }),
				reference: ({ logits }) => reference(logits!, labels, width, live, zLoss),
			});
		});
	}

	test("large logits, in any order of the maximum, neither overflow nor vanish", () => {
		const width = 5000;
		const values = Float32Array.from({ length: 3 * width }, (_, i) => (i % width) * (i < width ? 0.2 : -0.2) + 300);
		const labels = Int32Array.of(width - 1, 0, 17);
		using logits = Tensor.from(device, values, [3, width]);
		using labelTensor = Tensor.from(device, labels);
		using loss = crossEntropy(new Tape(device, { recording: false }), logits, labelTensor);
		expect(relativeRms(loss.toFloat32(), reference(Float64Array.from(values), labels, width, width, 0))).toBeLessThan(
			1e-6,
		);
	});

	test("a NaN logit gives a NaN loss, an infinite negative one is a zero probability", () => {
		const nan = Number.NaN;
		const none = Number.NEGATIVE_INFINITY;
		using logits = Tensor.from(device, Float32Array.of(none, nan, none, none, 1, 2, none, none, none), [3, 3]);
		using labels = Tensor.from(device, Int32Array.of(0, 1, 2));
		using loss = crossEntropy(new Tape(device, { recording: false }), logits, labels);
		const [first, second] = loss.toFloat32();
		expect(first).toBeNaN();
		expect(second).toBeCloseTo(Math.log(1 + Math.E), 6);
	});

	test("label -100: finite loss, the plain softmax as gradient, nothing when masked", () => {
		using logits = someLogits(2, 9);
		const values = Float64Array.from(logits.toFloat32());
		using labels = Tensor.from(device, Int32Array.of(-100, -100));
		const tape = new Tape(device, { recording: true });
		using loss = crossEntropy(tape, logits, labels);
		expect(relativeRms(loss.toFloat32(), reference(values, Int32Array.of(-100, -100), 9, 9, 0))).toBeLessThan(1e-6);
		loss.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 0)));
		tape.backward();
		using gradient = logits.gradient!.take()!;
		const got = gradient.toFloat32();
		expect(got.subarray(0, 9).reduce((a, b) => a + b)).toBeCloseTo(1, 6);
		expect([...got.subarray(9)]).toEqual(Array(9).fill(0));
	});

	test("two shards of the vocabulary equal one", () => {
		const [tokens, width, live, half] = [6, 22, 19, 11];
		const options = { zLoss: 1e-3, roundBf16: false };
		using logits = Tensor.from(device, randomValues(tokens * width, 3, 5), [tokens, width]);
		using labels = Tensor.from(device, someLabels(tokens, live));
		using dloss = Tensor.from(device, randomValues(tokens, 4));
		using whole = crossEntropyStatistics(logits, labels, { start: 0, live });
		const expected = crossEntropyLoss(whole, options.zLoss);
		using expectedGradient = Tensor.empty(device, logits.shape);
		crossEntropyBackward(logits, labels, expected.lse, dloss, expectedGradient, { start: 0, live }, options);

		const shards = [0, 1].map((s) => {
			const values = logits.toFloat32();
			const part = Float32Array.from({ length: tokens * half }, (_, i) => {
				return values[Math.floor(i / half) * width + s * half + (i % half)]!;
			});
			return {
				logits: Tensor.from(device, part, [tokens, half]),
				shard: { start: s * half, live: Math.min(half, live - s * half) },
			};
		});
		const parts = shards.map(({ logits, shard }) => crossEntropyStatistics(logits, labels, shard));
		const gather = (pick: (s: CrossEntropyStatistics) => Tensor) => {
			const to = Tensor.empty(device, [2, tokens], pick(parts[0]!).dtype);
			parts.forEach((part, s) => {
				using row = to.rowsFrom(s, 1);
				device.copy(row, pick(part), tokens * 4);
			});
			return to;
		};
		using both = new CrossEntropyStatistics(
			gather((s) => s.maximum),
			gather((s) => s.sumExp),
			gather((s) => s.targetLogit),
			gather((s) => s.found),
		);
		const combined = crossEntropyLoss(both, options.zLoss);
		expect(relativeRms(combined.loss.toFloat32(), expected.loss.toFloat32())).toBeLessThan(1e-6);
		const gradient = expectedGradient.toFloat32();
		for (const [s, { logits: part, shard }] of shards.entries()) {
			crossEntropyBackward(part, labels, combined.lse, dloss, part, shard, options);
			const slice = Float32Array.from({ length: tokens * half }, (_, i) => {
				return gradient[Math.floor(i / half) * width + s * half + (i % half)]!;
			});
			expect(relativeRms(part.toFloat32(), slice)).toBeLessThan(2e-6);
		}
		for (const owned of [...parts, ...shards.map((s) => s.logits), ...Object.values(expected)]) owned[Symbol.dispose]();
		for (const owned of Object.values(combined)) owned[Symbol.dispose]();
	});

	test("the gradient takes the logits' memory when the tape alone holds them", () => {
		for (const kept of [false, true]) {
			const logits = someLogits(4, 6);
			const values = logits.toFloat32();
			const slot = logits.gradient!;
			const { allocation } = logits;
			using labels = Tensor.from(device, Int32Array.of(0, 1, 2, 3));
			const tape = new Tape(device, { recording: true });
			using loss = crossEntropy(tape, logits, labels);
			if (!kept) logits[Symbol.dispose]();
			loss.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 1, 1, 1)));
			tape.backward();
			using gradient = slot.take()!;
			expect(gradient.allocation === allocation).toBe(!kept);
			if (kept) {
				expect(logits.toFloat32()).toEqual(values);
				logits[Symbol.dispose]();
			}
		}
	});

	test("roundBf16 rounds mask × (softmax - onehot) to nearest even and nothing else", () => {
		const run = (roundBf16: boolean) => {
			using logits = someLogits(5, 12);
			using labels = Tensor.from(device, someLabels(5, 12));
			const tape = new Tape(device, { recording: true });
			using loss = crossEntropy(tape, logits, labels, { roundBf16 });
			loss.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 1, 0, 1, 1)));
			tape.backward();
			using gradient = logits.gradient!.take()!;
			return gradient.toFloat32();
		};
		const rounded = new Uint32Array(run(true).buffer);
		expect([...rounded].map((bits) => bits >>> 16)).toEqual([...roundToBf16(run(false))]);
		expect(rounded.every((bits) => (bits & 0xffff) === 0)).toBe(true);
	});

	test("bf16 logits: the gradient is theirs, rounded once", () => {
		using plain = Tensor.from(device, randomValues(3 * 10, 8, 3), [3, 10], { dtype: "bf16" });
		using logits = plain.withGradient(new GradientSlot(device, [3, 10], "bf16"));
		const values = Float64Array.from(logits.toFloat32());
		const labels = Int32Array.of(1, 2, 9);
		using labelTensor = Tensor.from(device, labels);
		const tape = new Tape(device, { recording: true });
		using loss = crossEntropy(tape, logits, labelTensor);
		expect(relativeRms(loss.toFloat32(), reference(values, labels, 10, 10, 0))).toBeLessThan(1e-6);
		loss.gradient!.accumulate(Tensor.from(device, Float32Array.of(1, 1, 1)));
		tape.backward();
		using gradient = logits.gradient!.take()!;
		expect(gradient.dtype).toBe("bf16");
		const exact = Float64Array.from({ length: 30 }, (_, i) => {
			const row = values.subarray(i - (i % 10), i - (i % 10) + 10);
			const sum = row.reduce((a, l) => a + Math.exp(l), 0);
			return Math.exp(values[i]!) / sum - (labels[Math.floor(i / 10)] === i % 10 ? 1 : 0);
		});
		expect(relativeRms(gradient.toFloat32(), exact)).toBeLessThan(3e-3);
	});
});
