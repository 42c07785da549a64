/** Sequences of a pass over the training data. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { configurationOf } from "../../../src/config/resolve.ts";
import type { Key } from "../../../src/config/schema.ts";
import { sequencesOfEpoch } from "../../../src/train/feed/data-room.ts";
import { captions, Scratch } from "../../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const path = (name: string) => join(scratch.path, name);

const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n";
beforeAll(() => {
	captions(scratch, "one", [17, 9, 12], "2,1,0");
	captions(scratch, "two", [8, 13]);
	const items = "      - path: one\n        REP\n      - path: two\n        REP\n";
	scratch.file("blend.yaml", `${head}    blend:\n${items.replaceAll("REP", "weight: 1")}`);
	scratch.file("passes.yaml", `${head}    blend_epochized:\n${items.replaceAll("REP", "repetitions: 1.5")}`);
	scratch.file("half.yaml", `${head}    path: two\n    subset: {range: [0%, 50%]}\n`);
	scratch.file("words.txt", "a".repeat(641));
});

const vision = { preset: "nemotron-vlm-tiny" };
const sequences = (name: string | null, more: Partial<Record<Key, unknown>> = vision) =>
	sequencesOfEpoch(
		configurationOf({ ...more, "train-epochs": 2, ...(name === null ? {} : { "data-path": path(name) }) }),
	);

test("data sets have their samples, epochized blends those of their repetitions, subsets their own", () => {
	expect(sequences("two")).toBe(21);
	// Two of three shards are the part train.
	const one = sequences("one");
	expect([17 + 9, 17 + 12, 9 + 12]).toContain(one);
	expect(sequences("passes.yaml")).toBe(Math.ceil(1.5 * one + 1.5 * 21));
	expect(sequences("half.yaml")).toBe(10);
});

test("text has its windows", () => {
	const text = { preset: "nemotron-tiny", "seq-length": 64, split: "1,0,0" };
	expect(sequences("words.txt", text)).toBe(10);
	expect(sequences("words.txt", { ...text, split: "8,2,0" })).toBe(7);
});

test("blends by weight, packed sequences and mock data are refused", () => {
	expect(() => sequences(null)).toThrow("train-epochs 2: mock data are drawn, not read, so the number of");
	expect(() => sequences("blend.yaml")).toThrow(
		/^train-epochs 2: .*blend\.yaml blends data sets by weight, without an end, so the number of sequences of a pass is not known; give train-iters\.$/,
	);
	expect(() => sequences("two", { ...vision, "packing-buffer-size": 4 })).toThrow(
		/^train-epochs 2: packing-buffer-size 4 packs samples of .*two into sequences, so the number/,
	);
});
