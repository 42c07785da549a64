/**
 * How evenly encoder lanes share the images of a step, by number of samples and by cost: a table over size distributions of
 * public data sets for RADIO-H's operations, and a step of the CPU library on two ranks by both rules.
 */
import { availableParallelism } from "node:os";
import { configurationOf } from "../../src/config/resolve.ts";
import { imageGrid, tileCount, tileGrid } from "../../src/data/vision-language/image-plan.ts";
import { asRead, balanceByCost, workOf } from "../../src/guests/balance/balance.ts";
import type { PatchGrid } from "../../src/models/tower.ts";
import { encoderConfig } from "../../src/models/vision/from-configuration.ts";
import { imageCost, visionEncoder } from "../../src/models/vit/tower.ts";
import { runRanks } from "../parallel/ranks.ts";
import { type DistributionName, distributions, type ImageSize, sizesOf } from "./image-sizes.ts";
import { type Row, row } from "./measure.ts";

const steps = 200;
const microbatches = 4;

/** Patches of an image's parts: the image as it is, or its tiles and a thumbnail. */
const cuts: Readonly<Record<string, (size: NonNullable<ImageSize>) => PatchGrid[]>> = {
	"as they are, 256 to 16384 patches": (size) => [
		imageGrid(size, 16384, { patchSize: 16, minPatches: 256, maxPatches: 16384, minSide: 0, divisor: 2 }),
	],
	"tiles of 512, at most 12": (size) => {
		const tiling = { tileSize: 512, minTiles: 1, maxTiles: 12, areaWeighted: false, thumbnail: true };
		return Array.from({ length: tileCount(tileGrid(size, tiling), tiling) }, () => ({ rows: 32, columns: 32 }));
	},
};

const sum = (values: readonly number[]) => values.reduce((total, value) => total + value, 0);

/** Part of the time in which lanes wait, when all wait for the slowest after every microbatch. */
function idleShare(loads: readonly number[][]): number {
	const mean = sum(loads.map((one) => sum(one) / one.length));
	return 1 - mean / sum(loads.map((one) => Math.max(...one)));
}

/** The idle share of lanes that wait for each other at the end of a step alone. */
function idleShareOfSteps(loads: readonly number[][]): number {
	const stepsOf = Array.from({ length: loads.length / microbatches }, (_, step) => {
		const own = loads.slice(step * microbatches, (step + 1) * microbatches);
		return own[0]!.map((_, lane) => sum(own.map((one) => one[lane]!)));
	});
	return idleShare(stepsOf);
}

const percent = (share: number) => `${(100 * share).toFixed(1)} %`;

/** Rows by distribution, form of the images, samples of a lane's microbatch and lanes. */
export function lanesTable(): string {
	const modules = visionEncoder(
		encoderConfig(configurationOf({ preset: "nemotron-20l", "model-provider": "nemotron-moe-vlm" })),
	);
	const rows: string[][] = [];
	for (const name of Object.keys(distributions) as DistributionName[]) {
		for (const [cut, partsOf] of Object.entries(cuts)) {
			for (const [samples, lanes] of [
				[1, 8],
				[4, 8],
				[16, 8],
				[16, 32],
			] as const) {
				const sizes = sizesOf(name, steps * microbatches * lanes * samples, 7);
				const costs = sizes.map((size) => (size ? partsOf(size).map((grid) => imageCost(modules, grid, false)) : []));
				const all = Array.from({ length: steps * microbatches }, (_, microbatch) =>
					Array.from({ length: lanes }, (_, lane) => {
						const first = (microbatch * lanes + lane) * samples;
						return costs.slice(first, first + samples).flat();
					}),
				);
				const [number, cost] = [
					all.map((costs) => workOf(costs, asRead(costs))),
					all.map((costs) => workOf(costs, balanceByCost(costs))),
				];
				const over = (loads: readonly number[][]) => (1 / (1 - idleShare(loads))).toFixed(2);
				rows.push([
					name,
					cut,
					String(samples),
					String(lanes),
					over(number),
					percent(idleShare(number)),
					percent(idleShareOfSteps(number)),
					over(cost),
					percent(idleShare(cost)),
				]);
			}
		}
	}
	const head = ["sizes", "images", "samples", "lanes", "number", "idle", "of a step", "cost", "idle"];
	const all = [head, ...rows];
	const widths = head.map((_, column) => Math.max(...all.map((line) => line[column]!.length)));
	const lines = all.map(
		(line) => `  ${line.map((cell, i) => cell[i < 2 ? "padEnd" : "padStart"](widths[i]!)).join("  ")}`,
	);
	return [
		"",
		"lanes: work of the heaviest encoder lane over the mean lane's, samples dealt by number and images by cost, and the part",
		`of the time that lanes wait for it in each microbatch (by number also: at the end of a step of ${microbatches} alone)`,
		...lines,
	].join("\n");
}

export async function benchLanes(): Promise<Row[]> {
	const outcomes = await runRanks("../bench/lanes-rank.ts", 2);
	const failed = outcomes.find(({ exitCode }) => exitCode !== 0);
	if (failed) throw new Error(`lanes-rank.ts failed:\n${failed.stderr}`);
	const { number, cost, ratio, expected } = JSON.parse(outcomes[0]!.stdout) as Record<string, number>;
	const about = {
		group: `two ranks of both modules, images of skewed sizes, ${availableParallelism()} cores`,
		operation: "training step by cost, processor time of the busier rank",
		shape: `encoder operations say ${expected!.toFixed(2)}`,
		threads: 1,
		baseline: "by number",
		// The language model's time is the same by both rules.
		target: 1 + (expected! - 1) / 2,
	};
	return [{ ...row(about, [cost!, number!]), ratio: ratio! }];
}
