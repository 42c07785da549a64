/** Sinkhorn's choice of experts against Megatron's algorithm in float64, and its routing weights. */
import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { route } from "../../src/tensor/ops/router.ts";
import { sinkhornOffsets } from "../../src/tensor/ops/sinkhorn.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues } from "../support.ts";
import { openDevices } from "./devices.ts";
import { referenceRouting } from "./router-reference.ts";

let device: Device;
openDevices((two) => {
	device = two;
});

/** Rows and columns of exp(logits) scaled in turns, until the columns' factors change by at most 1e-4 in the mean: log d_E. */
function offsetsOf(logits: Float64Array, experts: number): number[] {
	const tokens = logits.length / experts;
	const cost = logits.map(Math.exp);
	let columns = new Array<number>(experts).fill(1);
	for (let error = 1e9; error > 1e-4; ) {
		const sums = new Array<number>(experts).fill(0);
		for (let t = 0; t < tokens; t++) {
			const row = cost.subarray(t * experts, (t + 1) * experts);
			const factor = 1 / tokens / (row.reduce((sum, value, e) => sum + value * columns[e]!, 0) + 1e-8);
			for (let e = 0; e < experts; e++) sums[e]! += factor * row[e]!;
		}
		const next = sums.map((sum) => 1 / experts / (sum + 1e-8));
		error = next.reduce((sum, value, e) => sum + Math.abs(value - columns[e]!), 0) / experts;
		columns = next;
	}
	return columns.map(Math.log);
}

const one = (tokens: number) => ({ tokens, sumOverRanks: () => {} });

/** Logits that favour the last experts. */
function skewed(tokens: number, experts: number): Float32Array {
	return randomValues(tokens * experts, 5, 1.5).map((value, i) => value + (2 * (i % experts)) / experts);
}

describe("sinkhorn", () => {
	for (const [tokens, experts] of [
		[48, 4],
		[133, 12],
	] as const) {
		test(`the factors of ${experts} experts for ${tokens} tokens`, () => {
			const values = skewed(tokens, experts);
			using logits = Tensor.from(device, values, [tokens, experts]);
			using offsets = sinkhornOffsets(logits, one(tokens));
			const expected = offsetsOf(Float64Array.from(values), experts);
			for (const [e, value] of offsets.toFloat32().entries()) expect(value).toBeCloseTo(expected[e]!, 4);
		});
	}

	test("tokens of two ranks count together", () => {
		const values = skewed(48, 6);
		using whole = Tensor.from(device, values, [48, 6]);
		using expected = sinkhornOffsets(whole, one(48));
		using first = Tensor.from(device, values.slice(0, 20 * 6), [20, 6]);
		// The other rank's tokens, by the factors of every iteration.
		let columns = new Array<number>(6).fill(1);
		const sumOverRanks = (sums: Tensor) => {
			const all = sums.toFloat32();
			for (let t = 20; t < 48; t++) {
				const row = Array.from(values.subarray(t * 6, (t + 1) * 6), (value, e) => Math.exp(value) * columns[e]!);
				const total = row.reduce((sum, value) => sum + value, 0);
				for (const [e, value] of row.entries()) all[e]! += value / total;
			}
			columns = columns.map((factor, e) => 1 / (6 * (all[e]! / (48 * factor) + 1e-8)));
			device.copyToDevice(sums, all);
		};
		using offsets = sinkhornOffsets(first, { tokens: 48, sumOverRanks });
		for (const [e, value] of expected.toFloat32().entries()) expect(offsets.toFloat32()[e]!).toBeCloseTo(value, 4);
	});

	for (const [topk, scoreFunction] of [
		[1, "sigmoid"],
		[3, "softmax"],
	] as const) {
		test(`the best ${topk} by the offsets have their ${scoreFunction} as weights`, () => {
			const [tokens, experts] = [40, 8];
			const values = skewed(tokens, experts);
			const offsets = offsetsOf(Float64Array.from(values), experts);
			const sums = Float64Array.from(values, (logit, i) => logit + offsets[i % experts]!);
			const expected = referenceRouting(sums, experts, { topk, scoreFunction: "softmax", preSoftmax: true });
			const plain = referenceRouting(Float64Array.from(values), experts, { topk, scoreFunction });
			expect(expected.index).not.toEqual(plain.index);
			checkGradients(device, {
				inputs: { logits: { values, shape: [tokens, experts] } },
				forward: (tape, { logits }) => {
					using logitOffsets = sinkhornOffsets(logits!, one(tokens));
					using routing = route(tape, logits!, { topk, scoreFunction, preSoftmax: true, logitOffsets });
					expect([...routing.expertIndex.toInt32()]).toEqual(expected.index.flat());
					return routing.probabilities.share();
				},
				reference: ({ logits }) => {
					const row = (t: number) => logits!.subarray(t * experts, (t + 1) * experts);
					return Float64Array.from(
						expected.index.flatMap((chosen, t) => {
							const total = row(t).reduce((sum, value) => sum + Math.exp(value), 0);
							return chosen.map((e) => (topk > 1 ? Math.exp(row(t)[e]!) / total : 1 / (1 + Math.exp(-row(t)[e]!))));
						}),
					);
				},
			});
		});
	}
});
