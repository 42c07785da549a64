/** A training starts its encoder from Megatron's checkpoints, of an encoder alone or of models with one. */
import { afterAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openPretrained } from "../../../src/checkpoint/hf/pretrained.ts";
import { towerPrefix } from "../../../src/checkpoint/hf/vision-names.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { writeTorchDistFiles } from "../../../src/checkpoint/torch-dist/writer.ts";
import { memoryStore } from "../memory-store.ts";

const root = mkdtempSync(join(tmpdir(), "mimo-tower-"));
afterAll(() => rmSync(root, { recursive: true }));

const [layers, width, ffn] = [2, 16, 40];
/** Of Megatron's RADIOViTModel; its layers are stacked. */
const tower: Readonly<Record<string, readonly number[]>> = {
	class_token: [3, width],
	position_embeddings: [1, 9, width],
	"embedder.weight": [width, 12],
	"video_embedder.weight": [width, 24],
	"decoder.layers.self_attention.linear_qkv.weight": [layers, 3 * width, width],
	"decoder.layers.mlp.linear_fc1.weight": [layers, ffn, width],
};
const language = { "language_model.embedding.word_embeddings.weight": [5, 8], "vision_projection.weight": [8, width] };

/** A checkpoint of these tensors, which count up from 0, each from where the one before ends. */
function write(name: string, shapes: Readonly<Record<string, readonly number[]>>): string {
	const folder = join(root, name);
	mkdirSync(folder);
	let begin = 0;
	const tensors = Object.entries(shapes).map(([key, shape]) => {
		const count = shape.reduce((product, size) => product * size, 1);
		const values = Float32Array.from({ length: count }, (_, i) => begin + i);
		begin += count;
		return [key, { shape, values }];
	});
	writeTorchDistFiles(folder, {
		tensors: memoryStore(Object.fromEntries(tensors)),
		...{ extraStates: new Map(), items: new Map(), objects: new Map(), common: new Map() },
	});
	return folder;
}
const under = (prefix: string) =>
	Object.fromEntries(Object.entries(tower).map(([name, shape]) => [prefix + name, shape]));
const open = (loadVision: string, heads: number | null = 4) =>
	openPretrained({ loadHf: null, loadVision, loadProjector: null }, heads)!;

test.each([
	["an encoder alone", tower],
	["an encoder alone, wrapped", under("module.module.")],
	["MIMO's wrapper of one", under("radio_model.")],
	["a vision-language model", { ...under("llava_model.vision_model."), ...language }],
	["a model on grids", { ...under(towerPrefix.replace("encoder.", "encoder.module.")), ...language }],
])("%s", (name, shapes) => {
	using pretrained = open(write(name, shapes));
	expect(pretrained.descriptions[0]!.keys).toEqual({
		...{ visionNumLayers: layers, visionHiddenSize: width, visionFfnHiddenSize: ffn, classTokenLen: 3, patchDim: 2 },
		...{ visionPatchBias: false, visionClassTokenPositions: false, visionFinalLayernorm: false },
	});
	const { weights, notices } = pretrained;
	expect([...weights.tensors.keys()].every((key) => key.startsWith(towerPrefix))).toBe(true);
	expect(notices.join()).toContain("video_embedder.weight is left out");
	const second = readTensor(weights, `${towerPrefix}decoder.layers.1.mlp.linear_fc1.weight`);
	const before = Object.values(tower).reduce((sum, shape) => sum + shape.reduce((n, size) => n * size, 1), 0);
	expect(second).toEqual(Float32Array.from({ length: ffn * width }, (_, i) => before - ffn * width + i));
});

test("a checkpoint without a tower, and a tower whose heads nothing tells, are named", () => {
	expect(() => open(write("language", language))).toThrow("(--load-vision) holds no vision tower");
	expect(() => open(write("heads", tower), null)).toThrow("name it with --vision-num-attention-heads");
});
