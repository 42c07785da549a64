/**
 * Rank program of lanes.ts: both modules on two ranks, steps on samples of skewed image sizes. Runs by number and by cost
 * take turns on the same samples. Rank 0 prints the processor time of the busier rank in a step by both (a step takes as long
 * where nothing else runs), the median ratio, and that of the encoder's operations.
 */
import { configurationOf } from "../../src/config/resolve.ts";
import { placesInStep } from "../../src/data/images.ts";
import { asRead, type ByLane, balanceOf, balanceStep, workOf } from "../../src/guests/balance/balance.ts";
import type { PatchGrid } from "../../src/models/tower.ts";
import { imageCost } from "../../src/models/vit/tower.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { median } from "../../src/observe/series.ts";
import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { dealtTo, encoderMicrobatches, numbersFrom, planOf, type Sample } from "../../src/parity/verify/samples.ts";
import { specificationOn, subjectOf } from "../../src/parity/verify/subject.ts";
import { assemble } from "../../src/train/assemble.ts";
import { trainStep } from "../../src/train/step.ts";
import { placeOfRank } from "../parallel/ranks.ts";
import { sizesOf } from "./image-sizes.ts";

const place = await placeOfRank();
using device = Device.open(await openLibrary("cpu"), { threads: 1 });
using world = World.join(device, place.run, place.rank, place.backend);
const everyone = await world.group("world", [0, 1]);
const [batches, rounds] = [5, 4];
const sequenceLength = 320;
const subject = subjectOf(
	configurationOf({
		preset: "nemotron-vlm-tiny",
		"vision-num-layers": 6,
		"vision-hidden-size": 256,
		"vision-num-attention-heads": 4,
		"vision-ffn-hidden-size": 1024,
		"dynamic-resolution": true,
		"global-batch-size": 16,
		"micro-batch-size": 8,
		"seq-length": sequenceLength,
	}),
	0,
);
const { tower } = subject.encoders[0]!.parts;
const layout = namedTopology(parseLayout("dp2|dp2"));
const plan = planOf(layout, { ...subject, samples: subject.samples.length });

/** Images of LAION-400M's sizes at patches of 32 pixels, at most 1024 of them. */
function gridsOf(seed: number): (PatchGrid | null)[] {
	const even = (pixels: number) => Math.min(32, 2 * Math.ceil(pixels / 64));
	return sizesOf("LAION-400M", subject.samples.length, seed).map(
		(size) => size && { rows: even(size.height), columns: even(size.width) },
	);
}

function samplesOf(seed: number): Sample[] {
	const next = numbersFrom(seed);
	const samples = gridsOf(seed).map((grid): Sample => {
		const rows = grid === null ? 0 : tower.rowsOf(grid);
		const ids = Int32Array.from({ length: sequenceLength }, (_, at) =>
			at < rows ? subject.encoders[0]!.placeholderId : at % 97,
		);
		const labels = Int32Array.from(ids, (_, at) => (at < rows ? -100 : at % 89));
		const patches = grid === null ? 0 : grid.rows * grid.columns * tower.patchWidth;
		return {
			text: {
				ids,
				labels,
				lossMask: Float32Array.from(labels, (label) => Number(label >= 0)),
				lengths: [sequenceLength],
			},
			features: {
				radio_encoder: {
					patches: Float32Array.from({ length: patches }, () => 2 * next() - 1),
					grids: grid === null ? [] : [grid],
					imagesPerSample: [grid === null ? 0 : 1],
				},
			},
		};
	});
	const places = placesInStep(samples.map(({ features }) => features.radio_encoder!));
	return samples.map(({ text }, index) => ({ text, features: { radio_encoder: places[index]! } }));
}

async function open(encoderBalance: "number" | "cost") {
	const specification = {
		...specificationOn(subject, layout.topology),
		guests: [balanceOf({ encoderBalance })].filter((guest) => guest !== null),
	};
	const run = await assemble(specification, layout.topology, world);
	run.initialise(1);
	return run;
}

const all = Array.from({ length: batches }, (_, batch) => samplesOf(batch + 1));
using number = await open("number");
using cost = await open("cost");
const seconds = { number: [] as number[], cost: [] as number[] };
for (let round = 0; round < rounds; round++) {
	for (const samples of all) {
		const microbatches = dealtTo(world.rank, plan, samples);
		for (const [name, run] of [
			["number", number],
			["cost", cost],
		] as const) {
			everyone.barrier();
			const start = process.cpuUsage();
			trainStep(run.state, { microbatches, iteration: round, learningRate: 0, weightDecay: 0 });
			const { user, system } = process.cpuUsage(start);
			const ranks = everyone.exchange(Int32Array.of(user + system)).map(([micros]) => micros!);
			if (round > 0) seconds[name].push(Math.max(...ranks) / 1e6);
		}
	}
}

/** Operations of the lane that has the most in a step, by the rules. */
function expected(samples: readonly Sample[]): { number: number; cost: number } {
	const lanes = [0, 1].map((lane) => encoderMicrobatches(plan, samples, layout.topology.featureEdges[0]!, lane));
	const costs = Array.from({ length: plan.microbatches }, (_, m) =>
		lanes.map((own) => own[m]!.grids.map((grid) => imageCost(subject.encoders[0]!.parts, grid, false))),
	);
	const most = (deals: readonly ByLane[]) => {
		const work = deals.map((deal, m) => workOf(costs[m]!, deal));
		return Math.max(...[0, 1].map((lane) => work.reduce((sum, one) => sum + one[lane]!, 0)));
	};
	return { number: most(costs.map(asRead)), cost: most(balanceStep(costs, "every step")) };
}

const most = all.map(expected);
const ratios = seconds.number.map((one, index) => one / seconds.cost[index]!);
if (place.rank === 0) {
	console.log(
		JSON.stringify({
			number: median(seconds.number),
			cost: median(seconds.cost),
			ratio: median(ratios),
			expected: median(most.map(({ number, cost }) => number / cost)),
		}),
	);
}
