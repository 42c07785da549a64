import { describe, expect, test } from "bun:test";
import { addProjector, detectProjector, projectorPrefix } from "../../../src/checkpoint/hf/projector-names.ts";
import {
	addTower,
	detectTower,
	publishedTower,
	type TowerSpelling,
	towerPrefix,
} from "../../../src/checkpoint/hf/vision-names.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { memoryStore } from "../memory-store.ts";

const [width, heads, d] = [8, 2, 4];
const sizes = {
	visionNumLayers: 2,
	visionHiddenSize: width,
	visionNumAttentionHeads: heads,
	visionFfnHiddenSize: 16,
	classTokenLen: 3,
	patchDim: 2,
	positions: 16,
};
const projector = {
	visionProjectionType: "mlp",
	visionProjectionNorm: true,
	visionProjectionFfnHiddenSize: 6,
	input: 32,
	output: 10,
} as const;

function linked(spelling: TowerSpelling, style: "published" | "transformers" = "published"): CorrespondenceBuilder {
	const builder = new CorrespondenceBuilder("here");
	addTower(builder, sizes, spelling, "here");
	addProjector(builder, projector, style);
	return builder;
}

/** Tensors of a spelling, every element another number. */
function stored(builder: CorrespondenceBuilder): TensorStore {
	let next = 0;
	return memoryStore(
		Object.fromEntries(
			[...builder.foreign].map(([name, shape]) => {
				const elements = shape.reduce((n, size) => n * size, 1);
				return [name, { shape, values: Float32Array.from({ length: elements }, () => next++) }];
			}),
		),
	);
}

/** Row r of linear_qkv, by head: query, key, value (docs/spec/vision.md §1.3). */
function expectInterleaved(fused: Float32Array, parts: readonly Float32Array[], columns: number): void {
	for (let head = 0; head < heads; head++) {
		parts.forEach((part, t) => {
			for (let row = 0; row < d; row++) {
				const from = (head * d + row) * columns;
				const to = (head * 3 * d + t * d + row) * columns;
				expect(fused.slice(to, to + columns)).toEqual(part.slice(from, from + columns));
			}
		});
	}
}

const layer = `${towerPrefix}decoder.layers.1.self_attention.linear_qkv.`;
const kinds = [
	["weight", width],
	["bias", 1],
] as const;

describe("published names", () => {
	const builder = linked(publishedTower);
	const folder = stored(builder);

	test("are the specification's", () => {
		const shapes = Object.fromEntries([...folder.tensors].map(([name, { shape }]) => [name, shape]));
		const prefix = "vision_model.radio_model.model.";
		expect(shapes).toMatchObject({
			[`${prefix}patch_generator.cls_token.token`]: [3, width],
			[`${prefix}patch_generator.pos_embed`]: [1, 16, width],
			[`${prefix}patch_generator.embedder.weight`]: [width, 12],
			[`${prefix}blocks.0.norm1.weight`]: [width],
			[`${prefix}blocks.1.attn.qkv.weight`]: [3 * width, width],
			[`${prefix}blocks.1.attn.qkv.bias`]: [3 * width],
			[`${prefix}blocks.1.mlp.fc1.weight`]: [16, width],
			"mlp1.0.weight": [32],
			"mlp1.1.weight": [6, 32],
			"mlp1.3.weight": [10, 6],
		});
		expect(detectTower(folder.tensors)).toEqual(publishedTower);
		expect(detectProjector(folder.tensors)).toBe("published");
	});

	test("to logical names and back", () => {
		const logical = new MappedStore(folder, planTensors(folder, builder, "logical"));
		expect([...logical.tensors.keys()]).toContain(`${projectorPrefix}linear_fc1.layer_norm_weight`);
		expect(logical.tensors.get(`${towerPrefix}class_token`)!.shape).toEqual([3, width]);
		for (const [kind, columns] of kinds) {
			const whole = readTensor(folder, `${publishedTower.prefix}blocks.1.attn.qkv.${kind}`) as Float32Array;
			const parts = [0, 1, 2].map((t) => whole.slice(t * width * columns, (t + 1) * width * columns));
			expectInterleaved(readTensor(logical, layer + kind) as Float32Array, parts, columns);
		}
		const back = new MappedStore(logical, planTensors(logical, builder, "foreign"));
		expect(new Set(back.tensors.keys())).toEqual(new Set(folder.tensors.keys()));
		for (const name of folder.tensors.keys()) expect(readTensor(back, name)).toEqual(readTensor(folder, name));
	});

	test("a missing, an unknown and a mis-shaped tensor are named", () => {
		const tensors = new Map(folder.tensors);
		const norm = `${publishedTower.prefix}blocks.1.norm2.bias`;
		tensors.delete(norm);
		tensors.set("mlp1.9.weight", { dtype: "F32", shape: [1] });
		tensors.set("mlp1.0.weight", { dtype: "F32", shape: [31] });
		expect(() => planTensors({ path: "there", tensors }, builder, "logical")).toThrow(
			`1 missing: ${norm}; 1 unexpected: mlp1.9.weight; 1 of another shape: mlp1.0.weight has [31], expected [32]`,
		);
	});

	test("heads that do not divide the width are refused", () => {
		const bad = { ...sizes, visionNumAttentionHeads: 3 };
		expect(() => addTower(new CorrespondenceBuilder("here"), bad, publishedTower, "here")).toThrow("3 heads do not");
	});
});

test.each([
	["transformers", false, "attention.q_proj attention.k_proj attention.v_proj"],
	["transformers-bert", true, "attention.attention.query attention.attention.key attention.attention.value"],
] as const)("names of style %s: separate query, key and value", (style, classAxis, names) => {
	const spelling: TowerSpelling = { prefix: "radio.", style, classAxis };
	const builder = linked(spelling, "transformers");
	const folder = stored(builder);
	expect(detectTower(folder.tensors)).toEqual(spelling);
	expect(detectProjector(folder.tensors)).toBe("transformers");
	expect(folder.tensors.get("radio.embeddings.cls_register_token")!.shape).toEqual(
		classAxis ? [1, 3, width] : [3, width],
	);
	const logical = new MappedStore(folder, planTensors(folder, builder, "logical"));
	expect(logical.tensors.get(`${towerPrefix}class_token`)!.shape).toEqual([3, width]);
	for (const [kind, columns] of kinds) {
		const part = (name: string) => readTensor(folder, `radio.encoder.layer.1.${name}.${kind}`) as Float32Array;
		expectInterleaved(readTensor(logical, layer + kind) as Float32Array, names.split(" ").map(part), columns);
	}
});
