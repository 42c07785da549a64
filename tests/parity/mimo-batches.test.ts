/** The data of a mimo-* folder: which image belongs to which sample, and how many encoder ranks saw one. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { hashImage, MimoBatches } from "../../src/parity/mimo/batches.ts";
import type { MimoGoldenConfig } from "../../src/parity/mimo/golden.ts";
import { participantsOf } from "../../src/parity/mimo/golden-checks.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-batches-"));
afterAll(() => rmSync(folder, { recursive: true }));

const [steps, lanes, perLane, length] = [3, 4, 2, 8];
const shape = [steps, lanes, perLane, length];
const values = steps * lanes * perLane * length;
const patch = 768;

/** A folder whose encoder had `ranks` data-parallel ranks and whose images have these seeds, [lane][sample of the lane]. */
function batches(
	ranks: number,
	textOnly: [number, number, number][],
	seedOf: (lane: number, sample: number) => number,
) {
	const hidden = new Set(textOnly.filter(([step]) => step === 1).map(([, lane, m]) => `${lane} ${m - 1}`));
	const images = Array.from({ length: lanes * perLane }, (_, index) => {
		const [lane, sample] = [Math.floor(index / perLane), index % perLane];
		return hidden.has(`${lane} ${sample}`) ? new Float32Array(patch) : hashImage(patch, seedOf(lane, sample), 0.05);
	});
	writeSafetensors(join(folder, "batches.safetensors"), [
		{ name: "input_ids", dtype: "I32", shape, data: () => new Int32Array(values) },
		{ name: "labels", dtype: "I32", shape, data: () => new Int32Array(values) },
		{ name: "loss_mask", dtype: "U8", shape, data: () => new Uint8Array(values) },
		{
			name: "images",
			dtype: "F32",
			shape: [1, lanes, perLane, 1, patch],
			data: () => Float32Array.from(images.flatMap((image) => [...image])),
		},
	]);
	return new MimoBatches(folder, {
		language_model: { sequence_length: length },
		vision: { resolution: "dynamic", grid_rows: 1, grid_columns: 1, patch_size: 16 },
		data: {
			...{ steps, lanes, microbatches_per_lane: perLane, image_shape: [1, patch], text_only: { samples: textOnly } },
			image_hash: { first_seed_per_lane: [70, 71, 72, 73], scale: 0.05 },
		},
		layout: { encoder: { tensor_parallel: 1, data_parallel: ranks } },
	} as unknown as MimoGoldenConfig);
}

test("an encoder rank for each lane: every lane counts its samples", () => {
	const read = batches(4, [], (lane, sample) => 70 + lane + sample);
	expect(read.microbatch(2, 1, 1).features.radio_encoder!.patches).toEqual(hashImage(patch, 71 + 5, 0.05));
});

test("an encoder rank for several lanes: their samples come in turns", () => {
	const read = batches(2, [], (lane, sample) => 70 + lane + 2 * sample);
	expect(read.microbatch(2, 1, 1).features.radio_encoder!.patches).toEqual(hashImage(patch, 71 + 10, 0.05));
});

test("other images than the configured ones are refused by place", () => {
	expect(() => batches(4, [], (lane, sample) => 70 + lane + sample + (lane === 2 && sample === 1 ? 1 : 0))).toThrow(
		/Image 1 of lane 2, step 1 in .*batches\.safetensors is not that of config\.json's image_hash\./,
	);
});

test("participants are encoder ranks, not lanes", () => {
	// Step 2: lanes 0 and 1 are text alone, so is one microbatch of lane 2. Step 3: no lane has an image.
	const all = Array.from({ length: lanes * perLane }, (_, i): [number, number, number] => [
		3,
		Math.floor(i / perLane),
		1 + (i % perLane),
	]);
	const text: [number, number, number][] = [[2, 0, 1], [2, 0, 2], [2, 1, 1], [2, 1, 2], [2, 2, 1], ...all];
	const counts = (ranks: number) => {
		const read = batches(ranks, text, (lane, sample) => 70 + lane + sample);
		return [0, 1, 2].map((step) => participantsOf(read.config, step));
	};
	expect(counts(4)).toEqual([4, 2, 0]);
	expect(counts(2)).toEqual([2, 1, 0]);
	expect(counts(1)).toEqual([1, 1, 0]);
});
