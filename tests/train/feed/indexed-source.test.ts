/** Every layout of lanes takes the same samples, encoder and language ranks in the same order. */
import { expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { type ImageTextMicrobatch, noText } from "../../../src/data/microbatch.ts";
import { topologyOf } from "../../../src/parallel/topology.ts";
import { type BatchSource, dataPlaceOf } from "../../../src/train/feed/batch-source.ts";
import {
	endlessEvaluation,
	type IndexedData,
	indexedEvaluation,
	indexedTraining,
} from "../../../src/train/feed/indexed-source.ts";

const patch = 3 * 8 ** 2;

/** Sample n: the token n, and unless n is a multiple of 3 one picture of 1 × (n mod 4 + 1) patches of value n. */
const numbered: IndexedData = {
	microbatch: ({ first, count }, { wantsText, features }) => {
		const numbers = Array.from({ length: count }, (_, i) => first + i);
		const pictures = numbers.filter((n) => n % 3 !== 0).map((n) => ({ n, columns: (n % 4) + 1 }));
		return {
			text: wantsText
				? {
						ids: Int32Array.from(numbers),
						labels: Int32Array.from(numbers),
						lossMask: new Float32Array(count).fill(1),
						lengths: numbers.map(() => 1),
					}
				: noText,
			features: features.radio_encoder
				? {
						radio_encoder: {
							patches: Float32Array.from(pictures.flatMap(({ n, columns }) => new Array(columns * patch).fill(n))),
							grids: pictures.map(({ columns }) => ({ rows: 1, columns })),
							imagesPerSample: numbers.map((n) => (n % 3 === 0 ? 0 : 1)),
						},
					}
				: {},
		};
	},
};

function configuration(layout: Record<string, number>) {
	return configurationOf({
		preset: "nemotron-vlm-tiny",
		"dataset-provider": "mock",
		"micro-batch-size": 2,
		"global-batch-size": 16,
		"lr-warmup-iters": 0,
		...layout,
	});
}

/** Numbers of a microbatch's pictures, and their places in the global batch, as the encoder sees them. */
function pictures({ features: { radio_encoder: images } }: ImageTextMicrobatch): { n: number; place: number }[] {
	let at = 0;
	return (images?.grids ?? []).map(({ columns }, index) => {
		const n = images!.patches[at]!;
		at += columns * patch;
		return { n, place: images!.indices![index]! };
	});
}

const layouts: readonly Record<string, number>[] = [
	{ "llm-offset": 0 },
	{ "encoder-dp": 1 },
	{ "encoder-dp": 2, "llm-dp": 2 },
	{ "encoder-dp": 1, "llm-dp": 4 },
	{ "encoder-dp": 2, "llm-dp": 4, "llm-tp": 2, "encoder-tp": 2 },
	{ "encoder-dp": 4, "llm-dp": 2 },
];

test.each(layouts)("%p reads the samples of a step once, in lane order", async (layout) => {
	const c = configuration(layout);
	const topology = topologyOf(c);
	const sources = Array.from({ length: topology.worldSize }, (_, rank): [number, BatchSource] => [
		rank,
		indexedTraining(c, dataPlaceOf(topology, rank), numbered),
	]);
	const iteration = 3;
	const seen = new Map<number, number>();
	for (const [rank, source] of sources) {
		const microbatches = await source.step(iteration);
		const { dp } = topology.gridOf(rank).coordinates(rank);
		if (topology.encoders[0]?.contains(rank) !== true) {
			const perLane = 16 / topology.language.lanes;
			const own = microbatches.flatMap(({ text }) => [...text.ids]);
			expect(own).toEqual(Array.from({ length: perLane }, (_, i) => 32 + dp * perLane + i));
		}
		for (const microbatch of microbatches) {
			for (const { n, place } of pictures(microbatch)) {
				// A picture's place tells its sample, whichever rank encodes it.
				expect(place).toBe((n - 32) * 4096);
				seen.set(n, (seen.get(n) ?? 0) + 1);
			}
		}
		if (topology.encoders[0]?.contains(rank)) {
			// Microbatch m: that of every lane served, or this rank's share of one.
			const { lanes, share } = dataPlaceOf(topology, rank);
			for (const [m, microbatch] of microbatches.entries()) {
				const perLane = 16 / topology.language.lanes;
				const wanted = lanes
					.flatMap((lane) => [0, 1].map((row) => 32 + lane * perLane + 2 * m + row))
					.filter((_, index) => share.count === 1 || index === share.index)
					.filter((n) => n % 3 !== 0);
				expect(pictures(microbatch).map(({ n }) => n)).toEqual(wanted);
			}
		}
	}
	// Tensor-parallel encoder ranks see the same; a language rank alone sees none.
	const copies = topology.encoders[0]?.shape.tensor ?? 1;
	for (let n = 32; n < 48; n++) expect(seen.get(n) ?? 0).toBe(n % 3 === 0 ? 0 : copies);
});

test("evaluations look at the same samples, or go on where the last one stopped", async () => {
	const c = configuration({ "encoder-dp": 1, "llm-dp": 2 });
	const place = dataPlaceOf(topologyOf(c), 2);
	const ids = (list: readonly ImageTextMicrobatch[]) => list.flatMap(({ text }) => [...text.ids]);
	const same = indexedEvaluation(c, place, numbered, { samples: 23, whole: true });
	// Lane 1 of 2: of 23 samples 20 are whole microbatches for both lanes.
	expect(ids(await same.microbatches(null))).toEqual([10, 11, 12, 13, 14, 15, 16, 17, 18, 19]);
	expect(ids(await same.microbatches(1))).toEqual([8, 9, 10, 11, 12, 13, 14, 15]);
	expect(ids(await same.microbatches(1))).toEqual([8, 9, 10, 11, 12, 13, 14, 15]);
	const short = indexedEvaluation(c, place, numbered, { samples: 23, whole: false });
	expect((await short.microbatches(null)).map(({ text }) => text.ids.length)).toEqual([2, 2, 2, 2, 2, 1]);
	const none = indexedEvaluation(c, place, numbered, { samples: 3, whole: true });
	expect(() => none.microbatches(null)).toThrow("3 held-out samples are fewer than one evaluation microbatch");
	const endless = endlessEvaluation(c, place, numbered, 0);
	const [first, second] = [ids(await endless.microbatches(1)), ids(await endless.microbatches(1))];
	expect(new Set([...first, ...second]).size).toBe(16);
});
