/** Modules that share ranks are refused where plan's number is larger than the device. */
import { expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import { planRank } from "../../src/plan/rank-plan.ts";
import { generousBytes, requireMemory } from "../../src/plan/require-memory.ts";

const shared = { preset: "nemotron-vlm-tiny", "encoder-dp": 2, "llm-offset": 0, "llm-pp": 2 };
const c = configurationOf(shared);
const peakOf = async (rank: number) => (await planRank(c, rank, { kind: "cpu", imbalance: 1 })).memory.peak;
const peaks = [await peakOf(0), await peakOf(1)];

test("a rank on a device of its own asks for itself", async () => {
	for (const rank of [0, 1]) {
		const device = { name: "small", kind: "cpu", ranks: [rank] } as const;
		await requireMemory(c, rank, { ...device, memoryBytes: peaks[rank]! });
		await expect(requireMemory(c, rank, { ...device, memoryBytes: peaks[rank]! - 1 })).rejects.toThrow(
			new RegExp(
				`^Rank ${rank} holds both modules and needs 0\\.0 GiB at the peak, as mimo plan counts; small has 0\\.0 GiB\\.`,
			),
		);
	}
});

test("ranks that share a device need it together", async () => {
	const device = { name: "host", kind: "cpu", ranks: [0, 1] } as const;
	const needed = peaks[0]! + peaks[1]!;
	await requireMemory(c, 0, { ...device, memoryBytes: needed });
	await expect(requireMemory(c, 0, { ...device, memoryBytes: needed - 1 })).rejects.toThrow(
		/^2 ranks share host, hold both/,
	);
	await requireMemory(c, 1, { ...device, memoryBytes: 1 });
});

test("on a processor a model in one process, and grids of their own, ask too", async () => {
	const device = { name: "host", kind: "cpu" } as const;
	const one = configurationOf({ preset: "nemotron-tiny", "data-path": "x.txt" });
	const { peak } = (await planRank(one, 0, { kind: "cpu", imbalance: 1 })).memory;
	await requireMemory(one, 0, { ...device, ranks: [0], memoryBytes: peak });
	await expect(requireMemory(one, 0, { ...device, ranks: [0], memoryBytes: peak - 1 })).rejects.toThrow(
		/^Rank 0 needs 0\.\d GiB at the peak, as mimo plan counts; host has 0\.\d GiB\./,
	);
	const apart = configurationOf({ ...shared, "llm-offset": 2 });
	await expect(requireMemory(apart, 0, { ...device, ranks: [0, 1, 2, 3], memoryBytes: 1 })).rejects.toThrow(
		/^4 ranks share host and need 0\.\d GiB at the peak/,
	);
});

test("GPUs of ranks of their own, and devices that do not tell, are not asked", async () => {
	const device = { name: "none", kind: "cpu", ranks: [0] } as const;
	await requireMemory(c, 0, { ...device, memoryBytes: 0 });
	const apart = configurationOf({ ...shared, "llm-offset": 2 });
	await requireMemory(apart, 0, { ...device, kind: "cuda", memoryBytes: 1 });
	// Data that mock data cannot imitate are not planned.
	const many = { "disable-vision-class-token": false, "pixel-shuffle": false, "class-token-len": 40 };
	const classes = configurationOf({ ...shared, ...many, "data-path": "x.yaml" });
	await requireMemory(classes, 0, { ...device, memoryBytes: 1 });
});

test("sizes far beyond a machine are refused without a plan", async () => {
	const device = { name: "host", kind: "cpu", ranks: [0], memoryBytes: 64 * 2 ** 30 } as const;
	const tiny = { preset: "nemotron-tiny", "data-path": "x.txt" };
	for (const [sizes, sentence] of [
		[
			{ "seq-length": 10 ** 12, "max-position-embeddings": 10 ** 12, "micro-batch-size": 2 },
			"A microbatch of 2 × 1000000000000 tokens (micro-batch-size × seq-length) needs 476837.2 GiB at least; host has 64.0 GiB.",
		],
		[
			{ "vocab-size": 2 ** 31 },
			"A vocabulary of 2147483648 tokens (vocab-size) needs 512.0 GiB at least; host has 64.0 GiB.",
		],
	] as const) {
		await expect(requireMemory(configurationOf({ ...tiny, ...sizes }), 0, device)).rejects.toThrow(sentence);
	}
});

test("the bound under which no plan is made is several times the peak of every small run, and still small", async () => {
	const tiny = { preset: "nemotron-tiny", "data-path": "x.txt" };
	const runs = [
		...[shared, { ...shared, "llm-offset": 2 }, { ...shared, "micro-batch-size": 8, "img-h": 1024, "img-w": 1024 }],
		...[{}, { "llm-tp": 2 }, { bf16: true }, { "lora-rank": 8 }, { "mtp-num-layers": 1 }].map((keys) => ({
			...tiny,
			...keys,
		})),
		{ ...tiny, "seq-length": 8192, "max-position-embeddings": 8192, "micro-batch-size": 1, "global-batch-size": 1 },
	];
	const ratios: number[] = [];
	for (const keys of runs) {
		const run = configurationOf(keys);
		const { peak } = (await planRank(run, 0, { kind: "cpu", imbalance: 1 })).memory;
		ratios.push(generousBytes(run) / peak);
	}
	expect(ratios.filter((ratio) => ratio < 8)).toEqual([]);
	expect(ratios.filter((ratio) => ratio > 64)).toEqual([]);
	const large = configurationOf({ preset: "nemotron-nano-30b-a3b", "data-path": "x.txt", "train-iters": 1 });
	expect(generousBytes(large)).toBeGreaterThan(2 ** 40);
});
