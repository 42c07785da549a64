import { describe, expect, test } from "bun:test";
import {
	fromLayout,
	layersByBlock,
	layersOfGpt,
	layoutOfArguments,
	toLayout,
} from "../../../src/checkpoint/conversion/layouts.ts";
import { canonicalLayout } from "../../../src/checkpoint/native/manifest.ts";
import { readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { layerSymbols } from "../../../src/config/hybrid-pattern.ts";
import { memoryStore } from "../memory-store.ts";

/** Tensors in memory, element i of tensor t being 1000 t + i. */
function numbered(shapes: Record<string, readonly number[]>): TensorStore {
	return memoryStore(
		Object.fromEntries(
			Object.entries(shapes).map(([name, shape], t) => {
				const elements = shape.reduce((n, size) => n * size, 1);
				return [name, { shape, values: Float32Array.from({ length: elements }, (_, i) => 1000 * t + i) }];
			}),
		),
	);
}

const rowsOf = (store: TensorStore, name: string, width: number) =>
	[...(readTensor(store, name) as Float32Array)]
		.filter((_, i) => i % width === 0)
		.map((value) => (value % 1000) / width);

const allOf = (store: TensorStore) =>
	Object.fromEntries([...store.tensors.keys()].map((name) => [name, readTensor(store, name)]));

describe("patterns with groups", () => {
	test("physical layers and the blocks they are in", () => {
		const indices = (pattern: string) =>
			layersByBlock(pattern, "here").map(({ kind, number }) => layerSymbols[kind] + number);
		expect(indices("M[*-]E")).toEqual(["M0", "*1", "-1", "E2"]);
		expect(indices("ME|*-/*E")).toEqual(["M0", "E1", "*2", "-3"]);
	});

	test("a block's layers have names of their own, and errors name the file", () => {
		const refuse = (pattern: string, sentence: string) =>
			expect(() => layersByBlock(pattern, "here")).toThrow(sentence);
		refuse("M[**]", 'here: group [**] of pattern "M[**]" has two layers of a kind');
		refuse("[-E]", "two layers of a kind");
		refuse("M[*[", 'here: Layer pattern "M[*[": position 4: groups cannot be nested');
	});
});

describe("layer names", () => {
	const layer = (index: number, rest: string) => `language_model.decoder.layers.${index}.${rest}`;
	const store = numbered({
		[layer(0, "mixer.in_proj.weight")]: [2],
		[layer(1, "self_attention.linear_proj.weight")]: [2],
		[layer(2, "mlp.linear_fc1.weight")]: [2],
		[layer(3, "pre_mlp_layernorm.weight")]: [2],
		[`optimizer.state.exp_avg.${layer(3, "mlp.router.weight")}`]: [2],
		"language_model.decoder.final_norm.weight": [2],
		"modality_submodules.x.decoder.layers.3.mlp.linear_fc1.weight": [2],
	});
	const layout = { ...canonicalLayout, layerNames: "logical", pattern: "M[*-]E", gluTensorParallel: 1 } as const;

	test("map to the other style and back", () => {
		const logical = toLayout(store, layout, "memory");
		expect([...logical.tensors.keys()]).toEqual([
			layer(0, "mixer.in_proj.weight"),
			layer(1, "self_attention.linear_proj.weight"),
			layer(1, "mlp.linear_fc1.weight"),
			layer(2, "pre_mlp_layernorm.weight"),
			`optimizer.state.exp_avg.${layer(2, "mlp.router.weight")}`,
			"language_model.decoder.final_layernorm.weight",
			"modality_submodules.x.decoder.layers.3.mlp.linear_fc1.weight",
		]);
		expect(allOf(fromLayout(logical, layout, "memory"))).toEqual(allOf(store));
	});

	test("without brackets the final norm keeps its name; without a pattern layers keep their names", () => {
		const plain = toLayout(store, { ...layout, pattern: "M*-E" }, "memory");
		expect([...plain.tensors.keys()]).toEqual([...store.tensors.keys()]);
		expect(() => toLayout(store, { ...layout, pattern: null }, "memory")).toThrow("--hybrid-layer-pattern");
		expect(() => toLayout(store, { ...layout, pattern: "M" }, "memory")).toThrow("belongs to no layer");
	});
});

describe("experts", () => {
	const key = "language_model.decoder.layers.0.mlp.experts.linear_fc1.weight";
	const layout = { ...canonicalLayout, experts: "grouped", gluTensorParallel: 1 } as const;
	const store = numbered({ [`${key}1`]: [2, 3], [`${key}0`]: [2, 3], "other.weight0": [1] });

	test("separate tensors ↔ one tensor", () => {
		const grouped = toLayout(store, layout, "memory");
		expect([...grouped.tensors]).toEqual([
			["other.weight0", expect.anything()],
			[key, expect.objectContaining({ shape: [2, 2, 3] })],
		]);
		expect([...(readTensor(grouped, key) as Float32Array)]).toEqual([
			1000, 1001, 1002, 1003, 1004, 1005, 0, 1, 2, 3, 4, 5,
		]);
		expect(allOf(fromLayout(grouped, layout, "memory"))).toEqual(allOf(store));
	});

	test("a missing expert, or both forms at once, is an error", () => {
		expect(() => toLayout(numbered({ [`${key}1`]: [2], [`${key}3`]: [2] }), layout, "memory")).toThrow(
			`memory: ${key}0, ${key}2 of 4 experts are missing.`,
		);
		expect(() => toLayout(numbered({ [`${key}0`]: [2], [`${key}1`]: [3] }), layout, "memory")).toThrow(
			`memory: ${key}1 have another shape than ${key}0, [2].`,
		);
		expect(() => toLayout(numbered({ [`${key}0`]: [2], [key]: [1, 2] }), layout, "memory")).toThrow("one by one");
	});
});

describe("gated rows", () => {
	const name = (fc: string) => `language_model.decoder.layers.0.mlp.experts.linear_${fc}.weight0`;
	const width = 3;

	/**
	 * docs/spec/checkpoint.md §5.3 row by row: where row s of [gate; linear] stands when T ranks interleave blocks of b.
	 */
	function storedRow(s: number, F: number, b: number, T: number): number {
		const [t, u] = [Math.floor(s / F), s % F];
		const [local, rank] = [F / T, Math.floor(u / (F / T))];
		const [j, o] = [Math.floor((u % local) / b), u % b];
		const inside = j * 2 * b + t * b + o;
		return Math.floor(inside / local) * F + rank * local + (inside % local);
	}

	for (const [F, b, T] of [
		[8, 2, 1],
		[8, 4, 1],
		[8, 2, 2],
		[12, 2, 2],
		[32, 4, 4],
		[12, 4, 1],
	] as const) {
		test(`${F} rows, blocks of ${b}, ${T} ranks`, () => {
			const store = numbered({ [name("fc1")]: [2 * F, width], [name("fc2")]: [5, F] });
			const layout = { ...canonicalLayout, glu: { experts: b, sharedExperts: 0 }, gluTensorParallel: T };
			const rows = rowsOf(toLayout(store, layout, "memory"), name("fc1"), width);
			for (let s = 0; s < 2 * F; s++) expect(rows[storedRow(s, F, b, T)]).toBe(s);
			expect(allOf(fromLayout(toLayout(store, layout, "memory"), layout, "memory"))).toEqual(allOf(store));
		});
	}

	test("weights that are not gated stay, sizes that do not divide are refused", () => {
		const layout = { ...canonicalLayout, glu: { experts: 3, sharedExperts: 0 }, gluTensorParallel: 1 };
		const plain = numbered({ [name("fc1")]: [8, width], [name("fc2")]: [5, 8] });
		expect(allOf(toLayout(plain, layout, "memory"))).toEqual(allOf(plain));
		const gated = numbered({ [name("fc1")]: [16, width], [name("fc2")]: [5, 8] });
		expect(() => toLayout(gated, layout, "memory")).toThrow("do not divide");
	});
});

test("layers of a GPT model: by order among those of a kind", () => {
	const numbers = (pattern: string) =>
		layersOfGpt(pattern, "here").map(({ kind, number }) => layerSymbols[kind] + number);
	expect(numbers("[*-][*-]")).toEqual(["*0", "-0", "*1", "-1"]);
	expect(numbers("M*M|[*E]EM")).toEqual(["Mnull", "*0", "Mnull", "*1", "E0", "E1", "Mnull"]);
	expect(numbers("*-*E/*E")).toEqual(["*0", "-0", "*1", "E1"]);
	expect(numbers("+-+E/+E")).toEqual(["+0", "-0", "+1", "E1"]);
	const refuse = (pattern: string, sentence: string) =>
		expect(() => layersOfGpt(pattern, "here")).toThrow(`here: ${sentence}`);
	refuse("**-", 'pattern "**-" is of no GPT model: it has 2 * and 1 -, and a layer of a GPT model has both');
	refuse("MM", 'pattern "MM" is of no GPT model: it has 0 * and 0 -');
	refuse("*-E", 'pattern "*-E" is of no GPT model: it has 1 * and 2 - or E');
	refuse("*-/M", 'pattern "*-/M" is of no GPT model: its multi-token prediction has the layers M');
	refuse("G*-", 'pattern "G*-" is of no GPT model: it has 2 * or G and 1 -');
	const delta = layersOfGpt("[G-][*E]", "here").map(({ number }) => number);
	expect(delta).toEqual([0, 0, 1, 1]);
	refuse("D-", 'Layer pattern "D-": position 1: DeepSeek sparse attention layers (D) are not built yet');
	refuse("D-", 'Layer pattern "D-": position 1: DeepSeek sparse attention layers (D)');
	refuse(
		"+-*-",
		'pattern "+-*-" is of no GPT model: it has + beside other attention, and the layers of a GPT model are alike',
	);
});

test("interleaved rows follow from Megatron's arguments", () => {
	expect(layoutOfArguments({ moe_mlp_glu_interleave_size: 32 }, "here")).toMatchObject({
		layerNames: "physical",
		glu: { experts: 32, sharedExperts: 0 },
	});
	expect(() => layoutOfArguments({ moe_mlp_glu_interleave_size: "a" }, "here")).toThrow(
		'here: the argument moe_mlp_glu_interleave_size is "a"',
	);
});
