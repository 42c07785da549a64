/** Plans with the built-in rates of an H200 against steps that H200s took (docs/measurements, docs/decisions/planning.md). */
import { expect, setDefaultTimeout, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { resolveConfiguration } from "../../src/config/resolve.ts";
import { acceleratorNames, acceleratorRates } from "../../src/plan/accelerators.ts";
import type { RatedName } from "../../src/plan/operation-work.ts";
import { secondsOf } from "../../src/plan/rates.ts";
import { planRun } from "../../src/plan/run-plan.ts";

setDefaultTimeout(60_000);

type Flags = Readonly<Record<string, string | null>>;

/** Flags and their values ("": none) of tests/cuda/twenty_layers.sh but for the layout. */
function twentyLayers(): Record<string, string> {
	const text = readFileSync(join(import.meta.dir, "../e2e/upstream-20l.txt"), "utf8").replaceAll(/^#.*$/gm, "");
	const flags = Object.fromEntries(
		[...text.matchAll(/--(\S+)((?: (?!--)\S+)*)/g)].map(([, name, value]) => [name!, value!.trim()]),
	);
	const changed = { "attention-backend": "fused", "global-batch-size": "4", "encoder-dp": "1", "train-iters": "12" };
	const { "tensor-parallel-num-weight-shards": _, "expert-tensor-parallel-num-weight-shards": __, ...rest } = flags;
	return { ...rest, ...changed };
}

async function planned(layout: Flags): Promise<number> {
	const flags = Object.entries({ ...twentyLayers(), ...layout }).filter(([, value]) => value !== null);
	const args = flags.flatMap(([name, value]) => [`--${name}`, ...(value === "" ? [] : value!.split(" "))]);
	const { configuration } = resolveConfiguration(args, {}, { trains: false });
	const { rates, memoryBytes } = acceleratorRates("h200");
	const { step } = await planRun(configuration, { rates, memoryBytes, kind: "cuda", ranksPerHost: 8, imbalance: 1 });
	return step.seconds;
}

const alone: Flags = Object.fromEntries([
	...["image-token-id", "dynamic-resolution", "pixel-shuffle", "disable-vision-class-token"].map((key) => [key, null]),
	...["encoder-ddp-overlap", "encoder-tp", "encoder-dp", "llm-offset"].map((key) => [key, null]),
	["llm-only", ""],
]);
const grids = (keys: readonly string[], size: string) => Object.fromEntries(keys.map((key) => [key, size]));

/** Layout and least seconds of its step: plans are of least times. */
const measured: readonly (readonly [string, Flags, number])[] = [
	[
		"both modules on one GPU, 32 experts",
		{ ...grids(["encoder-tp", "llm-tp", "llm-ep"], "1"), "llm-offset": "0", "num-experts": "32" },
		2.185,
	],
	["1+1, 64 experts", { ...grids(["encoder-tp", "llm-tp", "llm-ep", "llm-offset"], "1"), "num-experts": "64" }, 1.74],
	["tp2+tp2ep2", { "llm-offset": "2" }, 0.986],
	["tp2dp2+tp2dp2ep2", { ...grids(["encoder-dp", "llm-dp"], "2"), "global-batch-size": "8" }, 0.991],
	[
		"the language model alone, dp2 ep2, 64 experts",
		{ ...alone, ...grids(["llm-dp", "llm-ep"], "2"), "llm-tp": "1", "num-experts": "64" },
		0.379,
	],
	[
		"the language model alone on one GPU, 32 experts",
		{ ...alone, ...grids(["llm-tp", "llm-ep"], "1"), "num-experts": "32" },
		0.581,
	],
	[
		"the same with experts in e4m3",
		{
			...alone,
			...grids(["llm-tp", "llm-ep"], "1"),
			...{ "num-experts": "32", device: "cuda", "fp8-format": "e4m3", "fp8-recipe": "blockwise" },
		},
		0.55,
	],
	[
		"the same with experts and their weight gradients in e4m3",
		{
			...alone,
			...grids(["llm-tp", "llm-ep"], "1"),
			...{ "num-experts": "32", device: "cuda", "fp8-format": "e4m3", "fp8-recipe": "blockwise", "fp8-wgrad": "" },
		},
		0.536,
	],
];

test("experts in e4m3 take the times that layers of experts took, by how their rows are rounded", () => {
	const { rates } = acceleratorRates("h200");
	const milliseconds = (name: RatedName, amount: number) => 1000 * secondsOf({ name, amount, calls: 1 }, rates);
	// 64 experts of 2688 to 1856 with squared ReLU, 49,152 rows of 8192 tokens.
	const product = 2 * 49152 * 2688 * 1856;
	const [read, written] = [8192 * 2688, 49152 * 2688];
	const layer = (form: "" | " e4m3" | " e4m3 rounding" | " e4m3 alone", permutedBytes: number) =>
		milliseconds(`grouped_mlp_forward${form}`, 2 * product) +
		milliseconds(`grouped_mlp_backward${form}`, 2 * product) +
		2 * milliseconds("moe_permute", permutedBytes);
	const inBf16 = layer("", 2 * read + 2 * written);
	const share = (form: " e4m3" | " e4m3 rounding" | " e4m3 alone", bytes: number) => layer(form, bytes) / inBf16;
	const beside = share(" e4m3", 2 * read + 3 * written);
	const alone = share(" e4m3 alone", 2 * read + written);
	expect(Math.abs(beside / (2.44 / 3.59) - 1)).toBeLessThan(0.03);
	expect(Math.abs(alone / (2.32 / 3.59) - 1)).toBeLessThan(0.03);
	expect(share(" e4m3 rounding", 2 * read + 2 * written)).toBeGreaterThan(beside);
	const gradients = (form: "" | " e4m3 alone") => 2 * milliseconds(`grouped_gemm_weight_gradient${form}`, product);
	expect(Math.abs(gradients(" e4m3 alone") / (4.19 - 2.32) - 1)).toBeLessThan(0.1);
	expect(Math.abs(gradients("") / (5.54 - 3.59) - 1)).toBeLessThan(0.01);
});

for (const [name, layout, seconds] of measured) {
	test(`a step on H200s is planned within 5 %: ${name}`, async () => {
		expect(Math.abs((await planned(layout)) / seconds - 1)).toBeLessThan(0.05);
	});
}

test("masks of an elastic parent take less than 2 % of a step on one H200", async () => {
	const parent: Flags = {
		...alone,
		...grids(["llm-tp", "llm-ep"], "1"),
		...{ "num-experts": "32", "moe-aux-loss-coeff": "0", "moe-router-bias-update-rate": "0", "moe-fused-mlp": "off" },
	};
	const sizes = {
		...{ "emb-int-list": "2688 2016 1344", "mamba-int-list": "64 48 32", "mlp-int-list": "1856 1392 928" },
		...{ "moe-expert-int-list": "32 24 16", "budget-list": "1.0 0.7 0.5" },
	};
	const elastic = { ...parent, ...sizes, flextron: "", "enable-router": "" };
	const [plain, hard, soft] = [
		await planned(parent),
		await planned(elastic),
		await planned({ ...elastic, "soft-mask": "" }),
	];
	expect(hard / plain).toBeWithin(1, 1.02);
	expect(soft / plain).toBeWithin(1, 1.02);
});

test("other GPUs take longer by their vendors' peaks; points ascend", () => {
	const [h100, h200] = ["h100", "h200"].map((name) => acceleratorRates(name).rates);
	const seconds = (rates: typeof h100, name: "gemm" | "adamw") => secondsOf({ name, amount: 1e11, calls: 1 }, rates!);
	expect(seconds(h100, "gemm")).toBe(seconds(h200, "gemm"));
	const ratio = (seconds(h100, "adamw") - h100!.call) / (seconds(h200, "adamw") - h200!.call);
	expect(ratio).toBeCloseTo(4.8 / 3.35, 9);
	for (const name of acceleratorNames) {
		for (const points of Object.values(acceleratorRates(name).rates.operations)) {
			const amounts = points.map(({ amount }) => amount);
			expect(amounts).toEqual([...new Set(amounts)].toSorted((a, b) => a - b));
			expect(points.map((point) => point.seconds)).toEqual(
				points.map((point) => point.seconds).toSorted((a, b) => a - b),
			);
		}
	}
});
