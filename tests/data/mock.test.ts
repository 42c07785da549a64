import { describe, expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import { datasetSeed, MockData, mockGrid, mockImage, mockImages } from "../../src/data/mock.ts";

test("the specification's vector: vocabulary 131072, image id 511, seed 1234", () => {
	const data = new MockData({
		seed: datasetSeed(1234, "language", 0, "train"),
		size: 10,
		sequenceLength: 8,
		vocabularySize: 131072,
		imageTokenId: 511,
		imageTokens: 2,
	});
	const { ids, labels, lossMask, lengths } = data.microbatch(0, 2);
	expect([...ids.subarray(0, 8)]).toEqual([511, 511, 2421, 70294, 63520, 75132, 33387, 85444]);
	expect([...ids.subarray(10, 16)]).toEqual([46760, 99674, 90190, 14665, 117126, 119424]);
	expect([...labels.subarray(0, 8)]).toEqual([-100, 2421, 70294, 63520, 75132, 33387, 85444, -100]);
	expect([...lossMask.subarray(0, 8)]).toEqual([0, 1, 1, 1, 1, 1, 1, 0]);
	expect(lengths).toEqual([8, 8]);
	expect(() => data.microbatch(9, 2)).toThrow("Mock data has 10 samples (mock-dataset-size); sample 10 is asked for.");
});

/**
 * By run: the image tokens of a sample, and a lane's SHA-256 over input_ids and labels (int32, 4 x 256 a step) of its 30
 * steps, taken from the batches that Megatron-LM d98e8a64 drew.
 */
const megatronBatches: readonly (readonly [name: string, imageTokens: number, digests: readonly string[]])[] = [
	["mimo-1x1-fixed", 16, ["d9c19ec53684698e8f2d0904116e51dac08922bbc9a567bdcd62fba80ffdaa33"]],
	[
		"mimo-dp2-dp2ep2-fixed",
		16,
		[
			"d9c19ec53684698e8f2d0904116e51dac08922bbc9a567bdcd62fba80ffdaa33",
			"925033cb33f088b842f2661c84a9cf05d2fd5e5ba86c4bd4ee7174a6617f1b2a",
		],
	],
	["mimo-1x1-dynamic", 24, ["ee2f0f06880ef5c9e883e48099be3004b190210a7cb39503327762f636a8e979"]],
];

describe("Megatron-LM's own mock batches", () => {
	for (const [name, imageTokens, digests] of megatronBatches) {
		test(name, () => {
			for (const [lane, digest] of digests.entries()) {
				const data = new MockData({
					seed: datasetSeed(1234, "language", lane, "train"),
					size: 10000,
					sequenceLength: 256,
					vocabularySize: 1024,
					imageTokenId: 511,
					imageTokens,
				});
				const hasher = new Bun.CryptoHasher("sha256");
				for (let step = 0; step < 30; step++) {
					const drawn = data.microbatch(step * 4, 4);
					hasher.update(drawn.ids).update(drawn.labels);
				}
				expect(hasher.digest("hex")).toBe(digest);
			}
		});
	}
});

test("grids are nearest to square, even where pixels are shuffled", () => {
	expect(mockGrid(16384, true)).toEqual({ rows: 128, columns: 128 });
	expect(mockGrid(48, true)).toEqual({ rows: 6, columns: 8 });
	expect(mockGrid(40, true)).toEqual({ rows: 4, columns: 10 });
	expect(mockGrid(15, false)).toEqual({ rows: 3, columns: 5 });
	expect(() => mockGrid(15, true)).toThrow("No grid of 15 patches");
});

test("class tokens are image tokens too, and a fixed size may be wider than high", () => {
	const image = (values: Record<string, unknown>) =>
		mockImage(configurationOf({ preset: "nemotron-vlm-tiny", "pixel-shuffle": false, ...values }));
	const classes = { "disable-vision-class-token": false, "class-token-len": 4 };
	expect(image(classes)).toEqual({ grid: { rows: 4, columns: 7 }, tokens: 32 });
	expect(image({ ...classes, "dynamic-resolution": false, "img-h": 16, "img-w": 32 }).tokens).toBe(2 * 4 + 4);
	const wide = { "dynamic-resolution": false, "pixel-shuffle": true, "img-h": 16, "img-w": 32 };
	expect(image(wide)).toEqual({ grid: { rows: 2, columns: 4 }, tokens: 2 });
	expect(() => image({ ...classes, "class-token-len": 32 })).toThrow(
		"32 image tokens leave no patches beside 32 class tokens.",
	);
});

test("images are zeros, one a sample", () => {
	const { patches, grids, imagesPerSample } = mockImages(2, [{ rows: 2, columns: 4 }], 12);
	expect(patches).toEqual(new Float32Array(192));
	expect(grids.length).toBe(2);
	expect(imagesPerSample).toEqual([1, 1]);
});
