/** Megatron's indexed data in a run: which keys name them, how samples are dealt to lanes, what is held out. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { configurationOf } from "../../../src/config/resolve.ts";
import type { TrainingConfiguration } from "../../../src/config/schema.ts";
import { checkData } from "../../../src/data/check.ts";
import { openIndexedText } from "../../../src/data/megatron/from-configuration.ts";
import type { ImageTextMicrobatch } from "../../../src/data/microbatch.ts";
import { groupOfOne } from "../../../src/parallel/index.ts";
import { topologyOf } from "../../../src/parallel/topology.ts";
import { dataPlaceOf } from "../../../src/train/feed/batch-source.ts";
import { sequencesOfEpoch } from "../../../src/train/feed/data-room.ts";
import { ownLane } from "../../../src/train/feed/shared-batches.ts";
import { openSources } from "../../../src/train/feed/sources.ts";
import { Scratch } from "../../data/fixtures.ts";
import { vocabularySize, writeSet } from "../../data/megatron/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const path = (name: string) => join(scratch.path, name);

beforeAll(() => {
	const set = { sequences: 90, longest: 30, dtype: "uint16" } as const;
	for (const [i, name] of ["a", "b", "c d"].entries()) writeSet(path(name), { ...set, name, seed: i + 1 });
});

const small = { preset: "nemotron-tiny", "vocab-size": vocabularySize, "seq-length": 16, "train-iters": 4 };
const configuration = (keys: Record<string, unknown>) => configurationOf({ ...small, "eval-iters": 0, ...keys });

/** The first tokens of the training samples. */
function firstTokens(c: TrainingConfiguration, count: number): string[] {
	using text = openIndexedText(c);
	return Array.from({ length: count }, (_, i) => text.training.sample(i).join());
}

async function sourcesOf(c: TrainingConfiguration, rank: number, consumedValidSamples = 0) {
	const place = dataPlaceOf(topologyOf(c), rank);
	const world = groupOfOne("test", 0);
	return await openSources(c, place, { world, lane: ownLane, states: null, consumedValidSamples });
}

const idsOf = (microbatches: readonly ImageTextMicrobatch[]) => microbatches.map(({ text }) => text.ids.join());

test("lanes take microbatches in turn, as Megatron's samplers deal them", async () => {
	const c = configuration({ "data-path": path("a"), "llm-dp": 2, "micro-batch-size": 2, "global-batch-size": 8 });
	expect(c.datasetProvider).toBe("indexed");
	using text = openIndexedText(c);
	const row = (sample: number) => [...text.training.sample(sample).subarray(0, -1)];
	for (const lane of [0, 1]) {
		const { training } = await sourcesOf(c, lane);
		const first = [lane, lane + 2].map((turn) => [row(8 + 2 * turn), row(9 + 2 * turn)].join());
		expect(idsOf(await training.step(2))).toEqual(first);
		await training.close?.();
	}
});

test("evaluations go on where the one before stopped, the test begins at its first sample", async () => {
	const held = {
		"eval-iters": 1,
		"eval-interval": 1,
		"eval-global-batch-size": 2,
		"eval-micro-batch-size": 2,
		split: "80,10,10",
	};
	const c = configuration({ "data-path": path("a"), ...held });
	using text = openIndexedText(c);
	const rows = (source: "validation" | "test", first: number) => [
		[0, 1].flatMap((i) => [...text[source]!.sample(first + i).subarray(0, -1)]).join(),
	];
	const { validation, test: last } = await sourcesOf(c, 0);
	expect(idsOf(await validation!.microbatches(1))).toEqual(rows("validation", 0));
	expect(idsOf(await validation!.microbatches(1))).toEqual(rows("validation", 2));
	expect(idsOf(await (await sourcesOf(c, 0, 4)).validation!.microbatches(1))).toEqual(rows("validation", 4));
	expect(idsOf(await last!.microbatches(1))).toEqual(rows("test", 0));
	const all = await sourcesOf({ ...c, fullValidation: true }, 0);
	const whole = idsOf(await all.validation!.microbatches(1));
	expect(whole.length).toBeGreaterThan(2);
	expect(idsOf(await all.validation!.microbatches(1))).toEqual(whole);
});

test("a blend is named by words, a file of words, or a list in a configuration file", () => {
	const words = `0.3 ${path("a")} 0.7 ${path("b")}`;
	const expected = firstTokens(configuration({ "data-path": words }), 4);
	expect(
		firstTokens(configuration({ "data-args-path": scratch.file("words", words.replaceAll(" ", "\n")) }), 4),
	).toEqual(expected);
	expect(firstTokens(configuration({ "data-path": path("a") }), 4)).not.toEqual(expected);
	// A path with a blank in it is one prefix, and may end as the files do.
	const spaced = firstTokens(configuration({ "data-path": path("c d") }), 4);
	expect(firstTokens(configuration({ "data-path": path("c d.bin") }), 4)).toEqual(spaced);
});

test("splits have data of their own", async () => {
	const own = { "eval-iters": 1, "eval-global-batch-size": 2, "eval-micro-batch-size": 2 };
	const keys = { "train-data-path": path("a"), "valid-data-path": path("b"), "test-data-path": path("c d"), ...own };
	const lists = { train: [path("a")], valid: `1 ${path("b")}`, test: [path("c d")] };
	const file = scratch.file("splits.json", JSON.stringify(lists));
	const rows = (c: TrainingConfiguration) => {
		using text = openIndexedText(c);
		return [text.training, text.validation!, text.test!].map((source) => source.sample(0).join());
	};
	const expected = rows(configuration(keys));
	expect(rows(configuration({ "per-split-data-args-path": file, ...own }))).toEqual(expected);
	// data-path is all trained on where other data are held out.
	const { "train-data-path": train, ...others } = keys;
	expect(rows(configuration({ "data-path": train, ...others }))).toEqual(expected);
});

test("documents apart, and ends that do not count", async () => {
	const batch = { "data-path": path("a"), "global-batch-size": 4, "micro-batch-size": 4 };
	using order = openIndexedText(configuration(batch));
	const endId = order.training.sample(1)[5]!;
	const keys = { ...batch, "data-end-id": endId };
	const c = configuration({ ...keys, "reset-attention-mask": true, "reset-position-ids": true, "eod-mask-loss": true });
	const [{ text }] = (await (await sourcesOf(c, 0)).training.step(1)) as [ImageTextMicrobatch];
	const ends = [...text.ids.keys()].filter((at) => text.ids[at] === endId || at % 16 === 15);
	expect(text.lengths).toEqual(ends.map((end, i) => end - (ends[i - 1] ?? -1)));
	expect(text.samples).toEqual([16, 16, 16, 16]);
	expect([...text.lossMask]).toEqual(Array.from(text.ids, (id) => (id === endId ? 0 : 1)));
	expect(text.ids.includes(endId)).toBe(true);
});

test("a pass over one set has a length, a blend by weight none", () => {
	const c = configuration({ "data-path": path("a"), split: "1,0,0" });
	using text = openIndexedText(c, { epoch: true });
	expect(sequencesOfEpoch(c)).toBe(text.training.samples);
	expect(() => sequencesOfEpoch(configuration({ "data-path": `1 ${path("a")} 1 ${path("b")}` }))).toThrow(
		"The train data are blended by weight, without an end; one pass over them has no length.",
	);
});

test("what does not go together is refused by name", () => {
	const refused = (keys: Record<string, unknown>) => () =>
		checkData(configuration({ "data-path": path("a"), ...keys }));
	expect(refused({ "eod-mask-loss": true })).toThrow(
		"eod-mask-loss: neither data-end-id nor the tokenizer of bytes names the end of documents.",
	);
	expect(refused({ "train-data-path": path("b") })).toThrow("allowed only without data-path");
	expect(refused({ "dataset-provider": "mock", "test-data-path": path("b") })).toThrow(
		"allowed only with dataset-provider indexed",
	);
	expect(refused({ "data-path": `0 ${path("a")} 1 ${path("b")}` })).toThrow(
		/^data-path: 0 stands before .*a, where a weight above 0 is allowed\.$/,
	);
	expect(refused({ "data-path": `${path("a")} ${path("b")} ${path("a")}`, "train-iters": 4000 })).toThrow(
		/^The train data have \d+ samples, because a blend without weights gives every set once; the run takes 32000\.$/,
	);
	expect(refused({ "data-path": `1 ${path("a")} 1 ${path("absent")}` })).toThrow("absent.idx");
	expect(refused({ "vocab-size": 500 })).not.toThrow();
	expect(refused({ split: "1,1,100000", "train-iters": 1 })).toThrow(
		/^The train part of .*a has no tokens in 0 sequences\.$/,
	);
});
