import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import { datasetSeed, MockData, mockGrid, mockImages } from "../../src/data/mock.ts";
import { golden } from "../golden.ts";

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

describe("Megatron-LM's own mock batches", () => {
	for (const [name, imageTokens, lanes] of [
		["mimo-1x1-fixed", 16, 1],
		["mimo-dp2-dp2ep2-fixed", 16, 2],
		["mimo-1x1-dynamic", 24, 1],
	] as const) {
		test(name, () => {
			const folder = golden(name);
			if (folder === null) return;
			using file = openSafetensors(join(folder, "batches.safetensors"));
			const [ids, labels] = [file.read("input_ids") as Int32Array, file.read("labels") as Int32Array];
			const [steps, perLane, length] = [30, 4, 256];
			for (let lane = 0; lane < lanes; lane++) {
				const data = new MockData({
					seed: datasetSeed(1234, "language", lane, "train"),
					size: 10000,
					sequenceLength: length,
					vocabularySize: 1024,
					imageTokenId: 511,
					imageTokens,
				});
				for (let step = 0; step < steps; step++) {
					const begin = (step * lanes + lane) * perLane * length;
					const drawn = data.microbatch(step * perLane, perLane);
					expect(drawn.ids).toEqual(ids.slice(begin, begin + perLane * length));
					expect(drawn.labels).toEqual(labels.slice(begin, begin + perLane * length));
				}
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

test("images are zeros, one a sample", () => {
	const { patches, grids, imagesPerSample } = mockImages(2, { rows: 2, columns: 4 }, 12);
	expect(patches).toEqual(new Float32Array(192));
	expect(grids.length).toBe(2);
	expect(imagesPerSample).toEqual([1, 1]);
});
