import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openHuggingFaceSource } from "../../../src/checkpoint/conversion/hugging-face.ts";
import { towerPrefix } from "../../../src/checkpoint/hf/vision-names.ts";
import { writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readPieces, readTensor } from "../../../src/checkpoint/store.ts";
import { clipStatistics } from "../../../src/native/images.ts";
import { randomValues } from "../../support.ts";
import { conversionOptions } from "../conversion/options.ts";

let folder: string;
let count = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-radio-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const [width, inner] = [8, 12];
const block = "radio.encoder.layer.0.";
type Tensors = Readonly<Record<string, { readonly shape: readonly number[]; readonly values: Float32Array }>>;

function random(shape: readonly number[], seed: number): Tensors[string] {
	return {
		shape,
		values: randomValues(
			shape.reduce((product, size) => product * size, 1),
			seed,
		),
	};
}

/** A tower of one block under transformers' names. */
const tower: Tensors = {
	"radio.embeddings.cls_register_token": random([1, 3, width], 1),
	"radio.embeddings.position_embedding": random([1, 16, width], 2),
	"radio.embeddings.patch_projection.weight": random([width, 12], 3),
	...Object.fromEntries(
		["query", "key", "value"].map((part, i) => [
			`${block}attention.attention.${part}.weight`,
			random([width, width], 4 + i),
		]),
	),
	...Object.fromEntries(
		["attention.attention.query", "attention.attention.key", "attention.attention.value", "norm1", "norm2"].map(
			(name, i) => [`${block}${name}.bias`, random([width], 30 + i)],
		),
	),
	[`${block}norm1.weight`]: random([width], 40),
	[`${block}norm2.weight`]: random([width], 41),
	[`${block}attention.output.dense.weight`]: random([width, width], 7),
	[`${block}attention.output.dense.bias`]: random([width], 8),
	[`${block}layer_scale1.lambda1`]: random([width], 9),
	[`${block}mlp.fc1.weight`]: random([inner, width], 10),
	[`${block}mlp.fc1.bias`]: random([inner], 42),
	[`${block}mlp.fc2.weight`]: random([width, inner], 11),
	[`${block}mlp.fc2.bias`]: random([width], 12),
	[`${block}layer_scale2.lambda1`]: random([width], 13),
};

function write(tensors: Tensors, config: object = { model_type: "radio", num_attention_heads: 2 }): string {
	const path = join(folder, String(count++));
	mkdirSync(path);
	writeFileSync(join(path, "config.json"), JSON.stringify(config));
	writeSafetensors(
		join(path, "model.safetensors"),
		Object.entries(tensors).map(([name, { shape, values }]) => ({ name, dtype: "F32", shape, data: () => values })),
	);
	return path;
}

const open = (path: string, visionHeads: number | null = null) =>
	openHuggingFaceSource(path, conversionOptions({ from: "hf", to: "native", source: path, target: "", visionHeads }));
const layer = `${towerPrefix}decoder.layers.0.`;

describe("layer scale", () => {
	/** Rows of weight · x + bias, times lambda: what a block adds to its input. */
	function branch(weight: Float32Array, bias: Float32Array, lambda: ArrayLike<number>, x: Float32Array): number[] {
		return Array.from(bias, (b, row) => {
			const sum = x.reduce((total, value, i) => total + weight[row * x.length + i]! * value, b);
			return lambda[row]! * sum;
		});
	}

	test("is multiplied into the preceding projections, which leaves the block's output unchanged", () => {
		using source = open(write(tower));
		expect([...source.weights.tensors.keys()].some((name) => /scale|lambda/.test(name))).toBeFalse();
		const ones = new Float32Array(width).fill(1);
		for (const [stored, logical, lambda, size] of [
			["attention.output.dense", "self_attention.linear_proj", "layer_scale1", width],
			["mlp.fc2", "mlp.linear_fc2", "layer_scale2", inner],
		] as const) {
			const x = randomValues(size, 20);
			const of = (name: string) => tower[`${block}${name}`]!.values;
			const expected = branch(of(`${stored}.weight`), of(`${stored}.bias`), of(`${lambda}.lambda1`), x);
			const read = (kind: string) => readTensor(source.weights, `${layer}${logical}.${kind}`) as Float32Array;
			const actual = branch(read("weight"), read("bias"), ones, x);
			for (const [i, value] of actual.entries()) expect(value).toBeCloseTo(expected[i]!, 5);
			expect(actual).not.toEqual(branch(of(`${stored}.weight`), of(`${stored}.bias`), ones, x));
		}
		expect(source.notices.join()).toContain("2 layer scales are multiplied into the projections");
	});

	test("any range of a scaled tensor can be read", () => {
		using source = open(write(tower));
		const name = `${layer}mlp.linear_fc2.weight`;
		const whole = new Uint8Array((readTensor(source.weights, name) as Float32Array).buffer);
		for (const pieceBytes of [3, 8, 50]) {
			let offset = 0;
			for (const piece of readPieces(source.weights, name, { pieceBytes })) {
				expect(piece).toEqual(whole.subarray(offset, offset + piece.length));
				offset += piece.length;
			}
		}
	});

	test("of 1 changes no bit", () => {
		const one = { shape: [width], values: new Float32Array(width).fill(1) };
		const path = write({ ...tower, [`${block}layer_scale1.lambda1`]: one, [`${block}layer_scale2.lambda1`]: one });
		using source = open(path);
		const weight = readTensor(source.weights, `${layer}self_attention.linear_proj.weight`);
		expect(weight).toEqual(tower[`${block}attention.output.dense.weight`]!.values);
	});

	test("without its projection, or of another size, is refused by name", () => {
		const name = `${block}layer_scale1.lambda1`;
		expect(() => open(write({ ...tower, [name]: random([width + 1], 1) }))).toThrow(
			`${name} of shape [9] F32 scales no`,
		);
		const other = "radio.encoder.layer.1.layer_scale2.lambda1";
		expect(() => open(write({ ...tower, [other]: random([width], 1) }))).toThrow(`${other} of shape [8] F32 scales no`);
	});
});

describe("tensors that the model lacks", () => {
	const statistics = (values: readonly number[]) => ({ shape: [3, 1, 1], values: Float32Array.from(values) });

	test("normalisation as images have it, and summary indices, are left out with a reason", () => {
		const path = write({
			...tower,
			"radio.input_conditioner.norm_mean": statistics(clipStatistics.mean),
			"radio.input_conditioner.norm_std": statistics(clipStatistics.deviation),
			"radio.summary_idxs": random([2], 1),
		});
		using source = open(path);
		const notices = source.notices.join("\n");
		expect(notices).toContain("norm_mean is left out: images are normalised by this mean");
		expect(notices).toContain("norm_std is left out: images are normalised by this deviation");
		expect(notices).toContain("summary_idxs is left out: it says which class tokens");
	});

	test("another normalisation is refused", () => {
		const mean = { "radio.input_conditioner.norm_mean": statistics([0.5, 0.5, 0.5]) };
		expect(() => open(write({ ...tower, ...mean }))).toThrow("norm_mean is [0.5, 0.5, 0.5], and images are normalised");
	});

	test("other tensors are refused by name", () => {
		const names = [`${block}ls1.gamma`, "radio.extra.weight", "adaptor.weight"];
		const more = Object.fromEntries(names.map((name) => [name, random([width], 1)]));
		const refused = () => open(write({ ...tower, ...more }));
		for (const name of names) expect(refused).toThrow(name);
	});
});

describe("heads of the tower", () => {
	const heads = (path: string, flag: number | null = null) => {
		using source = open(path, flag);
		return source.model.visionNumAttentionHeads;
	};

	test("come from config.json, of a tower or of a model with one", () => {
		expect(heads(write(tower))).toBe(2);
		expect(heads(write(tower, { model_type: "vlm", vision_config: { num_attention_heads: 4 } }))).toBe(4);
	});

	test("come from a flag where config.json lacks them, which must not contradict it", () => {
		const silent = write(tower, { model_type: "vlm", num_attention_heads: 2 });
		expect(() => open(silent)).toThrow("--vision-num-attention-heads");
		expect(heads(silent, 4)).toBe(4);
		expect(() => open(write(tower), 4)).toThrow(
			"config.json says 2 heads of the vision tower, --vision-num-attention-heads 4",
		);
		expect(() => open(write(tower, { model_type: "radio", num_attention_heads: 3 }))).toThrow("3 heads do not divide");
	});

	test("determine the layout of query, key and value in the fused projection", () => {
		const [two, four] = [2, 4].map((number) => {
			using source = open(write(tower, { model_type: "radio", num_attention_heads: number }));
			return readTensor(source.weights, `${layer}self_attention.linear_qkv.weight`);
		});
		expect(two).not.toEqual(four!);
	});
});
