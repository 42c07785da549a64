/** Samples of an Energon data set for `mimo evaluate`: each once, several a microbatch. */
import { afterAll, expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { SkippedTally } from "../../../src/data/skipped-samples.ts";
import { groupOfOne } from "../../../src/parallel/group.ts";
import { topologyOf } from "../../../src/parallel/topology.ts";
import { dataPlaceOf } from "../../../src/train/feed/batch-source.ts";
import { energonSamplesOnce } from "../../../src/train/feed/energon-source.ts";
import type { DataOptions } from "../../../src/train/feed/sources.ts";
import { captions, Scratch } from "../../data/fixtures.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());
captions(folder, "birds", [10], "0,1,0");

for (const workers of [0, 3]) {
	test(`ten samples make microbatches of four, four and two, read by ${workers} data workers`, async () => {
		const c = configurationOf({
			preset: "nemotron-vlm-tiny",
			"data-path": `${folder.path}/birds`,
			"valid-data-path": `${folder.path}/birds`,
			"valid-data-split-part": "val",
			"caption-prompt": "what?",
			"seq-length": 128,
			"micro-batch-size": 4,
			"global-batch-size": 4,
			"lr-warmup-iters": 0,
			"llm-offset": 0,
			"num-workers": workers,
		});
		const lane = { reads: true, share: <V>(value: V | null) => value! } as unknown as DataOptions["lane"];
		const options = { world: groupOfOne("world", 0), lane, states: null, consumedValidSamples: 0 };
		const rounds = workers === 0 ? 10 : 12;
		const place = dataPlaceOf(topologyOf(c), 0);
		const microbatches = await energonSamplesOnce(c, place, options, new SkippedTally(), rounds);
		expect(microbatches.map(({ text }) => text.samples?.length)).toEqual(workers === 0 ? [4, 4, 2] : [4, 4, 4]);
		let counted = 0;
		for (const { text, features } of microbatches) {
			const images = features.radio_encoder!;
			expect(images.imagesPerSample.length).toBe(text.samples!.length);
			expect(text.lengths.reduce((sum, length) => sum + length, 0)).toBe(text.ids.length);
			let begin = 0;
			for (const length of text.samples!) {
				if (text.lossMask.subarray(begin, begin + length).some((one) => one > 0)) counted++;
				begin += length;
			}
		}
		expect(counted).toBe(10);
	}, 60_000);
}
