/** Stand-ins for what a set's samples need, and how well ways to pack them fill sequences and keep steps equal. */
import { configurationOf } from "../../../src/config/resolve.ts";
import { fullestSample, patchCount } from "../../../src/data/mock.ts";
import { taskOf } from "../../../src/data/vision-language/from-configuration.ts";
import { patchGrids, planImages } from "../../../src/data/vision-language/image-plan.ts";
import { type Bounds, choosePacks, type PackingMethod, type Size } from "../../../src/data/vision-language/packing.ts";
import { asRead, balanceByCost, workOf } from "../../../src/guests/balance/balance.ts";

/** Draws of a normal distribution, the same numbers every time. */
function normals(): () => number {
	let state = 1;
	const uniform = () => {
		state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
		return (state + 0.5) / 2 ** 32;
	};
	return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
}

/**
 * Token counts of samples of text: lognormal, median 665 and mean 997 (µ 6.5, σ 0.9 of the logarithm), cut at the capacity. The
 * same numbers every time.
 */
export function instructionLengths(count: number, capacity: number, { mu = 6.5, sigma = 0.9 } = {}): number[] {
	const normal = normals();
	return Array.from({ length: count }, () =>
		Math.min(capacity, Math.max(2, Math.round(Math.exp(mu + sigma * normal())))),
	);
}

/** The 20-layer model with its encoder, whose packs `mimo plan` counts for this set. */
export const twentyLayers = configurationOf({
	...{ preset: "nemotron-20l", "model-provider": "nemotron-moe-vlm", "use-distributed-optimizer": true },
	...{ "dynamic-resolution": true, "pixel-shuffle": true, "disable-vision-class-token": true },
	...{ "dataset-provider": "energon", "data-path": "photographs", "packing-buffer-size": 200 },
	...{ "encoder-dp": 1, "llm-dp": 1, "llm-offset": 0, "llm-ep": 1, "num-experts": 32 },
});

/** Sizes of photographs with captions as tests/cuda/pictures.sh makes them, for that model. */
export function photographs(count: number): Size[] {
	const { seqLength } = twentyLayers;
	const { sizing, tower, imageWork } = taskOf(twentyLayers);
	const [a, b, c] = imageWork!;
	const normal = normals();
	return Array.from({ length: count }, () => {
		const pixels = Math.min(4e6, Math.max(3e4, 0.33e6 * Math.exp(0.9 * normal())));
		const ratio = Math.exp(0.3 * normal());
		const [width, height] = [Math.floor((pixels * ratio) ** 0.5), Math.floor((pixels / ratio) ** 0.5)];
		const text = Math.floor(Math.min(400, Math.max(5, 40 * Math.exp(0.9 * normal()))));
		const [plan] = planImages([{ width, height }], seqLength - text, sizing, tower);
		const [{ rows, columns }] = patchGrids(plan!, tower.patchSize) as [{ rows: number; columns: number }];
		const patches = rows * columns;
		return { tokens: text + patches / 4, patches, work: a * patches ** 2 + b * patches + c };
	});
}

/** first-fit: every sample goes into the first open pack with room, as it comes; a buffer's packs are made together. */
export type Packer = PackingMethod | "first-fit";

/** Packs of a buffer, each sample in the first that has room. */
function firstFit(items: readonly Size[], capacity: number): Size[][] {
	const packs: { readonly items: Size[]; room: number }[] = [];
	for (const item of items) {
		let pack = packs.find(({ room }) => room >= item.tokens);
		if (pack === undefined) {
			pack = { items: [], room: capacity };
			packs.push(pack);
		}
		pack.items.push(item);
		pack.room -= item.tokens;
	}
	return packs.map(({ items: members }) => members);
}

interface Packing {
	readonly size: number;
	readonly packer: Packer;
	readonly most: Bounds;
}

/** Packs of a stream through a buffer of `size` samples; its end says nothing about a training that has none. */
function* packsOf(samples: readonly Size[], { size, packer, most }: Packing) {
	let next = 0;
	let buffer: Size[] = [];
	for (;;) {
		while (buffer.length < size && next < samples.length) buffer.push(samples[next++]!);
		if (buffer.length < size) return;
		const { groups, carried } =
			packer === "first-fit"
				? { groups: firstFit(buffer, most.tokens), carried: [] }
				: choosePacks(buffer, (sample) => sample, most, packer);
		yield* groups;
		buffer = [...carried];
	}
}

const total = (pack: readonly Size[], value: (sample: Size) => number) =>
	pack.reduce((sum, sample) => sum + value(sample), 0);

/** Part of all sequences that is padding when a stream is packed through a buffer of `size` samples. */
export function wasteOf(lengths: readonly number[], capacity: number, size: number, packer: Packer): number {
	const samples = lengths.map((tokens) => ({ tokens, patches: 0, work: 0 }));
	return padding([...packsOf(samples, { size, packer, most: { tokens: capacity, patches: 0 } })], capacity);
}

function padding(packs: readonly (readonly Size[])[], capacity: number): number {
	return 1 - total(packs.flat(), ({ tokens }) => tokens) / (packs.length * capacity);
}

interface Evenness {
	/** Standard deviation of the operations of steps, and of packs, over their mean. */
	readonly steps: number;
	readonly packs: number;
	readonly most: { readonly step: number; readonly patches: number };
	readonly padding: number;
	/**
	 * Part of the encoder's operations for which the lighter of two lanes waits in a microbatch: as the pictures were read, by cost within
	 * the patches that a lane has read, and by cost within those that `mimo plan` counts.
	 */
	readonly lanes: readonly [asRead: number, withinRead: number, withinPlanned: number];
}

/** Steps of four packs of photographs for the 20-layer model, which six data workers with a buffer each make in turn. */
export function evennessOf(samples: readonly Size[], packing: Omit<Packing, "most">, mostPatches: number): Evenness {
	const workers = 6;
	const capacity = twentyLayers.seqLength;
	const most = { tokens: capacity, patches: mostPatches };
	const streams = Array.from({ length: workers }, (_, worker) =>
		packsOf(
			samples.filter((_, place) => place % workers === worker),
			{ ...packing, most },
		),
	);
	const packs: (readonly Size[])[] = [];
	for (let worker = 0; ; worker = (worker + 1) % workers) {
		const { value, done } = streams[worker]!.next();
		if (done) break;
		packs.push(value);
	}
	const costs = packs.map((pack) => 1 + total(pack, ({ work }) => work));
	const steps = Array.from({ length: Math.floor(costs.length / 4) }, (_, step) =>
		costs.slice(4 * step, 4 * step + 4).reduce((sum, cost) => sum + cost, 0),
	);
	return {
		steps: spread(steps),
		packs: spread(costs),
		most: {
			step: Math.max(...steps) / mean(steps),
			patches: Math.max(...packs.map((p) => total(p, (s) => s.patches))),
		},
		padding: padding(packs, capacity),
		lanes: waitsOf(packs),
	};
}

function waitsOf(packs: readonly (readonly Size[])[]): Evenness["lanes"] {
	const planned = patchCount(fullestSample(twentyLayers)!.grids);
	const pairs = Array.from({ length: Math.floor(packs.length / 2) }, (_, pair) => packs.slice(2 * pair, 2 * pair + 2));
	const deals = pairs.map((lanes) => {
		const costs = lanes.map((pack) => pack.map(({ work }) => work));
		const patches = lanes.map((pack) => pack.map((sample) => sample.patches));
		const deals = [asRead(costs), balanceByCost(costs, patches), balanceByCost(costs, patches, planned)];
		return deals.map((deal) => workOf(costs, deal));
	});
	const waited = (way: number) =>
		mean(deals.map((ways) => Math.max(...ways[way]!))) / mean(deals.flatMap((ways) => ways[way]!)) - 1;
	return [waited(0), waited(1), waited(2)];
}

const mean = (values: readonly number[]) => values.reduce((sum, value) => sum + value, 0) / values.length;
const spread = (values: readonly number[]) =>
	Math.sqrt(mean(values.map((value) => (value - mean(values)) ** 2))) / mean(values);
