import { describe, expect, test } from "bun:test";
import {
	detectTower,
	projectorPrefix,
	towerPrefix,
	visionFromHuggingFace,
	visionToHuggingFace,
} from "../../../src/checkpoint/hf/vision-names.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { memoryStore } from "../memory-store.ts";

const [width, heads, d] = [8, 2, 4];

function store(shapes: Record<string, readonly number[]>): TensorStore {
	return memoryStore(
		Object.fromEntries(
			Object.entries(shapes).map(([name, shape], t) => {
				const elements = shape.reduce((n, size) => n * size, 1);
				return [name, { shape, values: Float32Array.from({ length: elements }, (_, i) => 1000 * t + i) }];
			}),
		),
	);
}

function logicalOf(stored: TensorStore, tower: string): MappedStore {
	const builder = new CorrespondenceBuilder("here");
	visionFromHuggingFace(builder, stored.tensors, tower, heads, "here");
	return new MappedStore(stored, planTensors(stored, builder, "logical"));
}

/** Row r of linear_qkv, by head: query, key, value (vision.md §1.3). */
function expectInterleaved(
	fused: Float32Array,
	q: Float32Array,
	k: Float32Array,
	v: Float32Array,
	columns: number,
): void {
	for (let head = 0; head < heads; head++) {
		[q, k, v].forEach((part, t) => {
			for (let row = 0; row < d; row++) {
				const from = (head * d + row) * columns;
				const to = (head * 3 * d + t * d + row) * columns;
				expect(fused.slice(to, to + columns)).toEqual(part.slice(from, from + columns));
			}
		});
	}
}

describe("published names", () => {
	const prefix = "vision_model.radio_model.model.";
	const shapes = {
		[`${prefix}patch_generator.cls_token.token`]: [3, width],
		[`${prefix}patch_generator.pos_embed`]: [1, 16, width],
		[`${prefix}patch_generator.embedder.weight`]: [width, 12],
		[`${prefix}blocks.0.norm1.weight`]: [width],
		[`${prefix}blocks.0.norm1.bias`]: [width],
		[`${prefix}blocks.0.attn.qkv.weight`]: [3 * width, width],
		[`${prefix}blocks.0.attn.qkv.bias`]: [3 * width],
		[`${prefix}blocks.0.attn.proj.weight`]: [width, width],
		[`${prefix}blocks.0.mlp.fc1.weight`]: [16, width],
		"mlp1.0.weight": [32],
		"mlp1.1.weight": [6, 32],
		"mlp1.3.weight": [10, 6],
	};

	test("to logical names and back", () => {
		const stored = store(shapes);
		expect(detectTower(stored.tensors.keys())).toBe(prefix);
		const logical = logicalOf(stored, prefix);
		expect([...logical.tensors.keys()]).toContain(`${projectorPrefix}encoder.linear_fc1.layer_norm_weight`);
		expect(logical.tensors.get(`${towerPrefix}class_token`)!.shape).toEqual([3, width]);
		const layer = `${towerPrefix}decoder.layers.0.self_attention.linear_qkv.`;
		for (const [kind, columns] of [
			["weight", width],
			["bias", 1],
		] as const) {
			const whole = readTensor(stored, `${prefix}blocks.0.attn.qkv.${kind}`) as Float32Array;
			const [q, k, v] = [0, 1, 2].map((t) => whole.slice(t * width * columns, (t + 1) * width * columns));
			expectInterleaved(readTensor(logical, layer + kind) as Float32Array, q!, k!, v!, columns);
		}
		const builder = new CorrespondenceBuilder("here");
		expect(visionToHuggingFace(builder, logical.tensors, heads, "there")).toEqual([]);
		const back = new MappedStore(logical, planTensors(logical, builder, "foreign"));
		expect(new Set(back.tensors.keys())).toEqual(new Set(stored.tensors.keys()));
		for (const name of stored.tensors.keys()) expect(readTensor(back, name)).toEqual(readTensor(stored, name));
	});

	test("what has no place there is returned by name", () => {
		const name = `${towerPrefix}decoder.final_layernorm.weight`;
		const homeless = visionToHuggingFace(
			new CorrespondenceBuilder("here"),
			store({ [name]: [width] }).tensors,
			heads,
			"there",
		);
		expect(homeless).toEqual([name]);
	});

	test("an unknown number of heads is asked for", () => {
		const builder = new CorrespondenceBuilder("here");
		const { tensors } = store(shapes);
		expect(() => visionFromHuggingFace(builder, tensors, prefix, null, "here")).toThrow("--vision-num-attention-heads");
	});
});

test("transformers' names: separate query, key and value", () => {
	const block = "radio.encoder.layer.0.";
	const stored = store({
		"radio.embeddings.cls_register_token": [1, 3, width],
		"radio.embeddings.position_embedding": [1, 16, width],
		"radio.embeddings.patch_projection.weight": [width, 12],
		[`${block}attention.attention.query.weight`]: [width, width],
		[`${block}attention.attention.key.weight`]: [width, width],
		[`${block}attention.attention.value.weight`]: [width, width],
		[`${block}attention.output.dense.bias`]: [width],
		[`${block}mlp.fc2.bias`]: [width],
	});
	expect(detectTower(stored.tensors.keys())).toBe("radio.");
	const logical = logicalOf(stored, "radio.");
	expect(logical.tensors.get(`${towerPrefix}class_token`)!.shape).toEqual([3, width]);
	const layer = `${towerPrefix}decoder.layers.0.`;
	expect(logical.tensors.has(`${layer}self_attention.linear_proj.bias`)).toBe(true);
	const part = (name: string) => readTensor(stored, `${block}attention.attention.${name}.weight`) as Float32Array;
	const fused = readTensor(logical, `${layer}self_attention.linear_qkv.weight`) as Float32Array;
	expectInterleaved(fused, part("query"), part("key"), part("value"), width);
});
