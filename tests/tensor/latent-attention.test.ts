/** Heads of latent attention, and the step on cached latents against attention over keys and values that are projected from them. */
import { expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { attention } from "../../src/tensor/ops/attention.ts";
import { type LatentHeads, latentAttentionStep, latentHeads } from "../../src/tensor/ops/latent-attention.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { openDevices } from "./devices.ts";

let device: Device;
openDevices((two) => {
	device = two;
});

test.each<[number, LatentHeads]>([
	[3, { heads: 2, contentDim: 3, positionDim: 2, valueDim: 4 }],
	[2, { heads: 3, contentDim: 1, positionDim: 4, valueDim: 1 }],
	[0, { heads: 1, contentDim: 2, positionDim: 2, valueDim: 2 }],
])("latentHeads of %d tokens, %j", (tokens, sizes) => {
	const { heads, contentDim: n, positionDim: r, valueDim: e } = sizes;
	const input = (width: number, seed: number) => ({
		values: randomValues(tokens * width, seed),
		shape: [tokens, width],
	});
	checkGradients(device, {
		inputs: { q: input(heads * (n + r), 1), kv: input(heads * (n + e), 2), position: input(r, 3) },
		forward: (tape, { q, kv, position }) => latentHeads(tape, { q: q!, kv: kv!, position: position! }, sizes),
		reference: ({ q, kv, position }) =>
			Float64Array.from(
				Array.from({ length: tokens * heads }, (_, row) => [
					...q!.subarray(row * (n + r), (row + 1) * (n + r)),
					...kv!.subarray(row * (n + e), row * (n + e) + n),
					...position!.subarray(Math.floor(row / heads) * r, (Math.floor(row / heads) + 1) * r),
					...kv!.subarray(row * (n + e) + n, (row + 1) * (n + e)),
				]).flat(),
			),
	});
});

test.each<[FloatDtype, number]>([
	["f32", 3e-6],
	["bf16", 1.5e-2],
])("a step on cached latents is attention over all tokens, %s", (dtype, tolerance) => {
	const sizes = { heads: 40, contentDim: 6, positionDim: 4, valueDim: 5 };
	const { heads, contentDim: n, positionDim: r, valueDim: e } = sizes;
	const [rank, softmaxScale, lengths] = [12, 0.4, [0, 3, 300]];
	const tape = new Tape(device, { recording: false });
	const make = (values: Float32Array, shape: readonly number[]) => Tensor.from(device, values, shape, { dtype });
	using weight = make(randomValues(heads * (n + e) * rank, 9, 0.5), [heads * (n + e), rank]);
	const firsts = lengths.map((_, s) => lengths.slice(0, s).reduce((sum, one) => sum + one + 2, 0));
	const rows = lengths.reduce((sum, one) => sum + one + 2, 0);
	const kept = new Float32Array(rows * (rank + r)).fill(1e9);
	const [queries, latents, positions, expected]: number[][] = [[], [], [], []];
	for (const [s, length] of lengths.entries()) {
		const tokens = length + 1;
		const [q, latent, position] = [heads * (n + r), rank, r].map((width, at) => {
			using rounded = make(randomValues(tokens * width, 10 * s + at, 2), [tokens, width]);
			return rounded.toFloat32();
		}) as [Float32Array, Float32Array, Float32Array];
		using turned = make(q, [tokens, heads * (n + r)]);
		using ofKeys = make(position, [tokens, r]);
		// Projected in fp32, as the step never rounds a key.
		const w = weight.toFloat32();
		const kv = Float32Array.from({ length: tokens * heads * (n + e) }, (_, index) => {
			const [token, row] = [Math.floor(index / (heads * (n + e))), index % (heads * (n + e))];
			let sum = 0;
			for (let i = 0; i < rank; i++) sum += latent[token * rank + i]! * w[row * rank + i]!;
			return sum;
		});
		using projected = make(kv, [tokens, heads * (n + e)]);
		using fused = latentHeads(tape, { q: turned, kv: projected, position: ofKeys }, sizes);
		using sequences = Sequences.of(device, [tokens]);
		const shape = { queryHeads: heads, keyHeads: heads, headDim: n + r, valueDim: e };
		using o = attention(tape, fused, { ...shape, sequences, mask: "causal", softmaxScale });
		expected!.push(...o.toFloat32().subarray(length * heads * e));
		queries!.push(...q.subarray(length * heads * (n + r)));
		latents!.push(...latent.subarray(length * rank));
		positions!.push(...position.subarray(length * r));
		for (let token = 0; token < length; token++) {
			const at = (firsts[s]! + token) * (rank + r);
			kept.set(latent.subarray(token * rank, (token + 1) * rank), at);
			kept.set(position.subarray(token * r, (token + 1) * r), at + rank);
		}
	}
	const count = lengths.length;
	using cache = make(kept, [rows, rank + r]);
	using q = make(Float32Array.from(queries!), [count, heads * (n + r)]);
	using latent = make(Float32Array.from(latents!), [count, rank]);
	using position = make(Float32Array.from(positions!), [count, r]);
	using firstRows = Tensor.from(device, Int32Array.from(firsts));
	using stored = Tensor.from(device, Int32Array.from(lengths));
	const places = { firstRows, lengths: stored, maxLength: 300 };
	using o = latentAttentionStep({ q, latent, position }, { ...sizes, weight, softmaxScale }, cache, places);
	expect(relativeRms(o.toFloat32(), expected!)).toBeLessThan(tolerance);
	// The new token stands behind the others of its sequence, and rows of no sequence stay as they were.
	const after = cache.toFloat32();
	for (const [s, length] of lengths.entries()) {
		const at = (firsts[s]! + length) * (rank + r);
		expect([...after.subarray(at, at + rank)]).toEqual(latents!.slice(s * rank, (s + 1) * rank));
		expect(after[at + rank + r]! > 9e8).toBeTrue();
	}
});
