/** Microbatches that the reading rank of a lane sends to the others. */
import { afterAll, expect, test } from "bun:test";
import { defaultLoaderConfiguration } from "../../../src/data/energon/loader/configuration.ts";
import type { ImageTextMicrobatch } from "../../../src/data/microbatch.ts";
import { EnergonSource } from "../../../src/data/routing/source.ts";
import { packMicrobatches, unpackMicrobatches } from "../../../src/train/feed/shared-batches.ts";
import { captions, joinLanes, Scratch } from "../../data/fixtures.ts";
import { smallTask } from "../../data/vision-language/task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const path = captions(scratch, "lane", [17, 9]);

async function read(keep: "text" | "images" | "both", mrope = false): Promise<ImageTextMicrobatch[]> {
	await using source = await EnergonSource.open({
		configuration: {
			...defaultLoaderConfiguration,
			path,
			task: { ...smallTask, keep, mrope },
			batchSize: 2,
			packingBufferSize: 5,
		},
		lanes: [0],
		routing: "lane",
		loader: { threads: 1 },
		state: null,
	});
	const batches: ImageTextMicrobatch[] = [];
	while (batches.length < 5) {
		const { text, images } = joinLanes(await source.next());
		batches.push({ text, features: { radio_encoder: images } });
	}
	return batches;
}

test("microbatches arrive as they were sent", async () => {
	for (const keep of ["text", "images", "both"] as const) {
		const sent = await read(keep);
		const bytes = packMicrobatches(sent);
		// Somewhere within a larger buffer.
		const shifted = new Uint8Array(bytes.length + 8).subarray(8);
		shifted.set(bytes);
		expect(unpackMicrobatches(shifted)).toEqual(sent);
	}
	expect(unpackMicrobatches(packMicrobatches([]))).toEqual([]);
	const placed = await read("text", true);
	expect(placed[0]!.text.positions!.length).toBe(3 * placed[0]!.text.ids.length);
	expect(unpackMicrobatches(packMicrobatches(placed))).toEqual(placed);
});

test("no pixel is among the bytes that language ranks send each other, no token among those of encoder ranks", async () => {
	const [text, images] = [await read("text"), await read("images")];
	const tokens = text.reduce((sum, one) => sum + one.text.ids.length, 0);
	const values = images.reduce((sum, one) => sum + one.features.radio_encoder!.patches.length, 0);
	// An id, a label and a mask a token; a float a pixel; lengths and sizes besides.
	const outline = 5 * 512;
	expect(values).toBeGreaterThan(10 * outline);
	expect(packMicrobatches(text).length).toBeWithin(12 * tokens, 12 * tokens + outline);
	expect(packMicrobatches(images).length).toBeWithin(4 * values, 4 * values + outline);
});
