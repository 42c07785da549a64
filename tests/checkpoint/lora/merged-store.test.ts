/** Merged weights: W + (α / r) B A in any piece and type; adapters that fit nothing are named. */
import { expect, test } from "bun:test";
import { bytesOf } from "../../../src/checkpoint/dtype.ts";
import { MergedStore, mergeAdapters, requireFinite } from "../../../src/checkpoint/lora/adapters.ts";
import { ConvertedStore, readPieces, readTensor } from "../../../src/checkpoint/store.ts";
import { randomValues } from "../../support.ts";
import { memoryStore } from "../memory-store.ts";

const [outputs, inputs, rank, scale] = [7, 5, 3, 2.5];
const layer = "language_model.decoder.layers.3.";
const tensor = (shape: number[], seed: number) => ({
	shape,
	values: randomValues(
		shape.reduce((product, size) => product * size, 1),
		seed,
	),
});
const stored: Readonly<Record<string, ReturnType<typeof tensor>>> = {
	[`${layer}mlp.linear_fc1.weight`]: tensor([outputs, inputs], 1),
	[`${layer}mlp.linear_fc1.adapter.linear_in.weight`]: tensor([rank, inputs], 2),
	[`${layer}mlp.linear_fc1.adapter.linear_out.weight`]: tensor([outputs, rank], 3),
	[`${layer}mlp.experts.linear_fc2.weight11`]: tensor([outputs, inputs], 4),
	[`${layer}mlp.experts.linear_fc2.adapter.linear_in.weight11`]: tensor([1, inputs], 5),
	[`${layer}mlp.experts.linear_fc2.adapter.linear_out.weight11`]: tensor([outputs, 1], 6),
	[`${layer}mlp.linear_fc2.weight`]: tensor([inputs, outputs], 7),
	[`${layer}mixer.norm.weight`]: tensor([inputs], 8),
};

/** A merged weight, in float64. */
function merged(weight: string, a: string, b: string): number[] {
	const [w, down, up] = [weight, a, b].map((name) => stored[layer + name]!.values);
	const r = down!.length / inputs;
	return Array.from(w!, (value, at) => {
		const [row, column] = [Math.floor(at / inputs), at % inputs];
		let sum = 0;
		for (let k = 0; k < r; k++) sum += up![row * r + k]! * down![k * inputs + column]!;
		return value + scale * sum;
	});
}

const dense = () =>
	merged(
		"mlp.linear_fc1.weight",
		"mlp.linear_fc1.adapter.linear_in.weight",
		"mlp.linear_fc1.adapter.linear_out.weight",
	);

test("weights of layers and of single experts; what has no adapter stays", () => {
	using store = new MergedStore(memoryStore(stored), scale);
	expect([...store.tensors.keys()]).toEqual(Object.keys(stored).filter((name) => !name.includes("adapter")));
	expect(readTensor(store, `${layer}mlp.linear_fc1.weight`)).toEqual(Float32Array.from(dense()));
	const expert = merged(
		"mlp.experts.linear_fc2.weight11",
		"mlp.experts.linear_fc2.adapter.linear_in.weight11",
		"mlp.experts.linear_fc2.adapter.linear_out.weight11",
	);
	expect(readTensor(store, `${layer}mlp.experts.linear_fc2.weight11`)).toEqual(Float32Array.from(expert));
	for (const name of ["mlp.linear_fc2.weight", "mixer.norm.weight"]) {
		expect(readTensor(store, layer + name)).toEqual(stored[layer + name]!.values);
	}
});

test("in pieces that end anywhere", () => {
	using store = new MergedStore(memoryStore(stored), scale);
	const whole = bytesOf(Float32Array.from(dense()));
	for (const pieceBytes of [3, 8, 20, 44]) {
		const pieces = Array.from(readPieces(store, `${layer}mlp.linear_fc1.weight`, { pieceBytes }), (piece) => [
			...piece,
		]);
		expect(pieces.flat()).toEqual([...whole]);
	}
});

test("a bf16 weight is rounded once", () => {
	const narrow = new ConvertedStore(memoryStore(stored), (name, { dtype }) =>
		name.endsWith("fc1.weight") ? "BF16" : dtype,
	);
	using store = new MergedStore(narrow, scale);
	const name = `${layer}mlp.linear_fc1.weight`;
	const wide = Array.from(readTensor(narrow, name) as Uint16Array, (bits) => bits << 16);
	const before = new Float32Array(Int32Array.from(wide).buffer);
	const added = dense().map((value, i) => value - stored[name]!.values[i]!);
	const bits = readTensor(store, name) as Uint16Array;
	const values = new Float32Array(Int32Array.from(bits, (one) => one << 16).buffer);
	for (const [i, value] of values.entries()) {
		const exact = before[i]! + added[i]!;
		expect(Math.abs(value - exact)).toBeLessThanOrEqual(2 ** -8 * Math.abs(exact));
	}
});

test("a merged value that is infinite or NaN is named, in any type and piece; values without an adapter are not looked at", () => {
	const name = `${layer}mlp.linear_fc1.weight`;
	const other = `${layer}mlp.linear_fc2.weight`;
	const planted = memoryStore({
		...stored,
		[other]: { shape: [inputs, outputs], values: new Float32Array(inputs * outputs).fill(Number.NaN) },
	});
	const large = new MergedStore(planted, 1e60);
	using checked = requireFinite(large, large);
	expect(() => readTensor(checked, name)).toThrow(
		`memory: with its adapter merged, ${name} has an infinite value or NaN as element 0.`,
	);
	expect(readTensor(checked, other)[0]).toBeNaN();
	// Finite in float32, and too large for float16.
	const merged = new MergedStore(planted, 1e6);
	const half = new ConvertedStore(merged, (_, { dtype }) => (dtype === "F32" ? "F16" : dtype));
	for (const pieceBytes of [2, 8, 64]) {
		expect(() => [...readPieces(requireFinite(half, merged), name, { pieceBytes })]).toThrow(
			/linear_fc1\.weight in memory holds -?\d+(\.\d+)?, beyond the largest value of F16 \(65504\)\.$/,
		);
	}
	expect(readTensor(requireFinite(merged, merged), name)).toHaveLength(outputs * inputs);
});

test("adapters without their weight, or of another shape, are named", () => {
	const { [`${layer}mlp.linear_fc1.weight`]: _, ...others } = stored;
	expect(() => new MergedStore(memoryStore(others), scale)).toThrow(
		`memory has ${layer}mlp.linear_fc1.adapter.linear_in.weight, but not the weight that it adapts.`,
	);
	const b = `${layer}mlp.linear_fc1.adapter.linear_out.weight`;
	expect(() => new MergedStore(memoryStore({ ...stored, [b]: tensor([outputs, 2], 1) }), scale)).toThrow(
		`the adapter of ${layer}mlp.linear_fc1.weight, [3,5 by 7,2], does not fit its shape [7,5].`,
	);
	const { [b]: __, ...half } = stored;
	expect(() => new MergedStore(memoryStore(half), scale)).toThrow(`memory has no tensor ${b}.`);
});

test("without adapters the store is returned unchanged", () => {
	const store = memoryStore(stored);
	expect(mergeAdapters(store, null)).toBe(store);
});
