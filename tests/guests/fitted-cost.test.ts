/** The cost of an image fitted to measured times, and that a training which goes on deals its images as it would have. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { fittedCost, MeasuredTimes } from "../../src/guests/balance/fitted-cost.ts";
import type { Group } from "../../src/parallel/index.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { captions, Scratch } from "../data/fixtures.ts";

const grid = (patches: number) => ({ rows: 1, columns: patches });
const alone = { exchange: (values: Int32Array) => [values] } as unknown as Group;

/** The fit of microbatches of images of these patches, each of which takes `time`. */
function fitOf(microbatches: readonly (readonly number[])[], time: (patches: number) => number) {
	const times = new MeasuredTimes();
	for (const own of microbatches) {
		const all = own.reduce((sum, patches) => sum + time(patches), 0);
		times.add(own.map(grid), all);
	}
	return times.fit(alone, alone);
}

describe("the fit", () => {
	const mixed = [[100, 900], [2500], [400, 400, 1600], [64, 3000, 250]];

	test("finds the three factors", () => {
		const fit = fitOf(mixed, (p) => 3 * (p / 1000) ** 2 + 2 * (p / 1000) + 0.5)!;
		for (const [i, wanted] of [3, 2, 0.5].entries()) expect(fit[i]).toBeCloseTo(wanted, 6);
		expect(fittedCost(fit, { rows: 20, columns: 50 })).toBeCloseTo(5.5, 6);
	});

	test("has no factor below 0, and fewer terms where images have one size", () => {
		const falling = fitOf(mixed, (p) => 10 - p / 1000)!;
		expect(Math.min(...falling)).toBeGreaterThanOrEqual(0);
		const equal = fitOf([[400], [400, 400]], () => 2)!;
		expect(fittedCost(equal, grid(400))).toBeCloseTo(2, 6);
		expect(new MeasuredTimes().fit(alone, alone)).toBeNull();
	});

	test("is of all lanes' times, as the first rank of each has them", () => {
		const [one, two] = [new MeasuredTimes(), new MeasuredTimes()];
		one.add([grid(1000)], 4);
		two.add([grid(2000)], 8);
		const words: Int32Array[] = [];
		const exchange = (values: Int32Array) => {
			words.push(values);
			return [values];
		};
		two.fit({ exchange } as unknown as Group, alone);
		const both = { exchange: (values: Int32Array) => [values, words[0]!] } as unknown as Group;
		const fit = one.fit(both, alone)!;
		expect(fittedCost(fit, grid(1000))).toBeCloseTo(4, 6);
		expect(fittedCost(fit, grid(2000))).toBeCloseTo(8, 6);
		expect(one.fit(alone, { exchange: () => [words[0]!] } as unknown as Group)).toEqual(two.fit(alone, alone));
	});
});

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
beforeAll(() => captions(scratch, "pictures", [40]));

describe("a training", () => {
	const common = [
		...[
			"train",
			"--preset",
			"nemotron-vlm-tiny",
			"--data-path",
			"pictures",
			"--seq-length",
			"64",
			"--dynamic-resolution",
		],
		...["--encoder-dp", "2", "--llm-dp", "2", "--micro-batch-size", "2", "--global-batch-size", "8", "--threads", "1"],
		...[
			"--data-threads",
			"1",
			"--encoder-cost-steps",
			"2",
			"--train-iters",
			"6",
			"--save",
			"run",
			"--save-interval",
			"4",
		],
		...["--log-interval", "1", ...deviceFlags.split(" ")],
	];
	const keptAt = (folder: string) => {
		using checkpoint = NativeCheckpoint.open(join(scratch.path, folder));
		return (checkpoint.manifest.common.training as { kept: Record<string, number[]> }).kept;
	};

	/** Of every tensor of the newest checkpoint. */
	const digests = (folder: string) => {
		using checkpoint = NativeCheckpoint.open(join(scratch.path, folder));
		return [...checkpoint.tensors.keys()].map((name) => {
			const values = readTensor(checkpoint, name) as Float32Array;
			return [name, new Bun.CryptoHasher("sha256").update(values).digest("hex")];
		});
	};

	test("keeps the fit of its warm-up, and goes on from it bit by bit", () => {
		expect(mimo(common, scratch.path)).toMatchObject({ exitCode: 0 });
		const kept = keptAt("run/iter_0000004");
		expect(kept["encoder-cost"]).toHaveLength(3);
		expect(Math.max(...kept["encoder-cost"]!)).toBeGreaterThan(0);
		const go = [...common.filter((flag) => flag !== "--save" && flag !== "run"), "--load", "run", "--ckpt-step", "4"];
		expect(mimo([...go, "--save", "again"], scratch.path)).toMatchObject({ exitCode: 0 });
		expect(keptAt("again")).toEqual(kept);
		expect(digests("again")).toEqual(digests("run"));
	}, 120_000);
});
