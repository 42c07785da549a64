/**
 * The samples that every layout of `mimo verify` trains on: packs of sequences of random ids with images of random values, drawn
 * from the configuration's seed. Some have no image, and with dynamic resolution no two neighbours have equally many rows, so
 * that lanes and microbatches are uneven.
 */
import { type ImageSet, joinImages } from "../../data/images.ts";
import {
	featuresOf,
	type ImageTextMicrobatch,
	joinPositions,
	type Microbatch,
	mediaPositions,
	noText,
} from "../../data/microbatch.ts";
import { shareOf } from "../../data/routing/image-share.ts";
import type { PatchGrid } from "../../models/tower.ts";
import { rowsByItem } from "../../models/vision/pictures.ts";
import { outputRows, patchWidth, type VitConfig } from "../../models/vit/config.ts";
import { type FeatureEdge, type NamedTopology, visionModule } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";

/** One sample: a pack of sequences, and what encoders read whose rows stand in it. */
export type Sample = ImageTextMicrobatch;

export interface SampleOptions {
	readonly count: number;
	readonly sequenceLength: number;
	readonly vocabularySize: number;
	readonly seed: number;
	/** Whether some labels do not count, of every sample another share. */
	readonly gaps: boolean;
	/** null: no sample has an image. */
	readonly images: ImageOptions | null;
	/** Items of further encoders, one of each in most samples, whose tokens follow the image's; default: none. */
	readonly others?: readonly {
		readonly name: string;
		/** Placeholder token. */
		readonly id: number;
		readonly grid: PatchGrid;
		/** Values of a patch. */
		readonly width: number;
	}[];
}

export interface ImageOptions {
	readonly tower: VitConfig;
	readonly imageTokenId: number;
	/** Largest image, in patches. */
	readonly grid: PatchGrid;
	/** Whether tokens have positions by the pictures among them. */
	readonly mrope: boolean;
	/** Images of different sizes, and samples of two. */
	readonly dynamic: boolean;
	/** Whether a learned row stands behind pictures; some then have several tiles. */
	readonly newline: boolean;
	/** The last samples, which are text alone; so is sample 2, where there are more than four. */
	readonly textOnly: number;
}

const ignored = -100;

/** Sequences of a sample: equally many of all, because seq_aux_loss takes the mean of a microbatch's sequences. */
const sequencesOfSample = 3;

/** mulberry32: numbers in [0, 1) that repeat. */
export function numbersFrom(seed: number): () => number {
	let state = seed >>> 0;
	return () => {
		state = (state + 0x6d2b79f5) >>> 0;
		let t = Math.imul(state ^ (state >>> 15), 1 | state);
		t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
		return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
	};
}

export function drawSamples(options: SampleOptions): Sample[] {
	let image = 0;
	return Array.from({ length: options.count }, (_, index) => {
		const { text, images, others } = drawSample(options, index);
		if (options.images === null) return { text, features: others };
		const placed = { ...images, indices: images.grids.map(() => image++) };
		return { text, features: { [visionModule]: placed, ...others } };
	});
}

/** Whether sample `index` is text alone. */
function isTextOnly(count: number, textOnly: number, index: number): boolean {
	return index >= count - textOnly || (textOnly > 0 && count > 4 && index === 2);
}

function drawSample(
	options: SampleOptions,
	index: number,
): { readonly text: Microbatch; readonly images: ImageSet; readonly others: Readonly<Record<string, ImageSet>> } {
	const { count, sequenceLength, vocabularySize, images, others = [] } = options;
	const next = numbersFrom(options.seed * 7919 + index);
	const chance = numbersFrom(options.seed * 7919 - 1 - index);
	const pictured = images !== null && !isTextOnly(count, images.textOnly, index) ? images : null;
	const grids = pictured === null ? [] : gridsOf(pictured, sequenceLength, index);
	const rows = pictured === null ? 0 : rowsOf(pictured, grids);
	// Of every three samples one has no item of a further encoder, each encoder another one.
	const heard = others.filter((_, at) => (index + at) % 3 !== 1);
	const more = heard.flatMap(({ id, grid }) => new Array<number>(grid.rows * grid.columns).fill(id));
	if (rows + more.length >= sequenceLength) {
		throw new UserError(`${rows + more.length} image rows leave no text in samples of seq-length ${sequenceLength}.`);
	}
	const taken = [...(images === null ? [] : [images.imageTokenId]), ...others.map(({ id }) => id)].sort(
		(a, b) => a - b,
	);
	const word = () =>
		taken.reduce((id, own) => (id >= own ? id + 1 : id), Math.floor(next() * (vocabularySize - taken.length)));
	// Images stand somewhere in the text, not only at its beginning.
	const first = Math.floor(next() * Math.min(8, sequenceLength - rows - more.length));
	const placed = [...new Array<number>(rows).fill(images?.imageTokenId ?? 0), ...more];
	const ids = Int32Array.from({ length: sequenceLength }, (_, at) => placed[at - first] ?? word());
	const ends = drawEnds(sequenceLength, next);
	const labels = Int32Array.from(ids, (_, at) => {
		const label = ends.includes(at + 1) ? ignored : ids[at + 1]!;
		const gap = options.gaps && 8 * chance() < index % 4;
		return gap || taken.includes(label) ? ignored : label;
	});
	const lossMask = Float32Array.from(labels, (label) => (label === ignored ? 0 : 1));
	const patches = grids.reduce((sum, grid) => sum + grid.rows * grid.columns, 0);
	const lengths = ends.map((end, at) => end - (ends[at - 1] ?? 0));
	const merge = images?.tower.pixelShuffle ? 2 : 1;
	const places = { placeholder: images?.imageTokenId ?? 0, merge };
	const positions = images?.mrope ? mediaPositions({ ids, lengths }, grids, places) : null;
	return {
		text: { ids, labels, lossMask, lengths, ...(positions && { positions }) },
		images: {
			patches: Float32Array.from({ length: pictured ? patches * frameWidth(pictured.tower) : 0 }, () => 2 * next() - 1),
			grids,
			imagesPerSample: [grids.length],
		},
		others: Object.fromEntries(
			others.map((other) => [
				other.name,
				{
					patches: Float32Array.from(
						{ length: heard.includes(other) ? other.grid.rows * other.grid.columns * other.width : 0 },
						() => 2 * next() - 1,
					),
					grids: heard.includes(other) ? [other.grid] : [],
					imagesPerSample: [heard.includes(other) ? 1 : 0],
				},
			]),
		),
	};
}

/** Ends of a sample's sequences, each of a token at least. Borders may fall within an image, as in no data: nothing depends on it. */
function drawEnds(tokens: number, next: () => number): number[] {
	const ends = new Set([tokens]);
	while (ends.size < Math.min(sequencesOfSample, tokens)) ends.add(1 + Math.floor(next() * (tokens - 1)));
	return [...ends].sort((a, b) => a - b);
}

/** Rows of a sample's images in its text. */
function rowsOf({ tower, newline }: ImageOptions, grids: readonly PatchGrid[]): number {
	const one = (grid: PatchGrid) => outputRows(tower, grid);
	return (newline ? rowsByItem(grids, one) : grids.map(one)).reduce((sum, rows) => sum + rows, 0);
}

/** A picture of three tiles, the last two beside each other and without their outer rows, resized. */
function tiled(grid: PatchGrid): PatchGrid[] {
	const top = Math.min(1, Math.floor((grid.rows - 1) / 2));
	const window = { top, left: 0, rows: grid.rows - 2 * top, columns: 2 * grid.columns };
	const kept = { rows: Math.max(1, window.rows - 1), columns: grid.columns + 1 };
	return [{ ...grid, picture: { tiles: { rows: 1, columns: 2 }, window, kept } }, grid, grid];
}

/** One image of the largest grid; with dynamic resolution smaller ones, and two where they leave half of the text. */
function gridsOf(options: ImageOptions, sequenceLength: number, index: number): PatchGrid[] {
	const { tower, grid, dynamic, newline } = options;
	if (newline && index % 3 !== 1 && 2 * rowsOf(options, tiled(grid)) <= sequenceLength) return tiled(grid);
	if (!dynamic) return [grid];
	const shrunk = (size: number, by: number) => Math.max(2, size - 2 * by);
	const one = { rows: shrunk(grid.rows, index % 3), columns: shrunk(grid.columns, (index + 1) % 2) };
	const two = { rows: 2, columns: 4 };
	const rows = outputRows(tower, one) + outputRows(tower, two);
	return index % 4 === 1 && 2 * rows <= sequenceLength ? [one, two] : [one];
}

/** Samples as one microbatch of the language model. */
function joinText(samples: readonly Sample[]): Microbatch {
	const tokens = samples.reduce((sum, { text }) => sum + text.ids.length, 0);
	const joined = { ids: new Int32Array(tokens), labels: new Int32Array(tokens), lossMask: new Float32Array(tokens) };
	let at = 0;
	for (const { text } of samples) {
		joined.ids.set(text.ids, at);
		joined.labels.set(text.labels, at);
		joined.lossMask.set(text.lossMask, at);
		at += text.ids.length;
	}
	const packed = samples.some(({ text }) => text.lengths.length > 1);
	return {
		...joined,
		lengths: samples.flatMap(({ text }) => text.lengths),
		...(packed && { samples: samples.map(({ text }) => text.ids.length) }),
		...joinPositions(samples.map(({ text }) => text)),
	};
}

/** Samples as one microbatch of an encoder. */
function joinSampleFeatures(samples: readonly Sample[], encoder: string): ImageSet {
	return joinImages(samples.map((sample) => featuresOf(sample, encoder)));
}

// The data of every rank of a layout, when all layouts get the same samples: lane l of L takes the l-th run of them,
// in microbatches of a size that the layout can cut.

export interface Plan extends NamedTopology {
	/** Samples of a language lane's microbatch. */
	readonly microBatchSize: number;
	/** Microbatches of a lane in a step. */
	readonly microbatches: number;
}

/** Divisors of n, ascending. */
function divisors(n: number): number[] {
	return Array.from({ length: n }, (_, index) => index + 1).filter((divisor) => n % divisor === 0);
}

/**
 * Deals out `samples` samples of `sequenceLength` tokens. The micro-batch size is the configured one, or the nearest that divides
 * the samples, larger ones first. Throws a UserError that names the number that does not divide.
 */
export function planOf(
	{ name, topology }: NamedTopology,
	options: { readonly samples: number; readonly microBatchSize: number; readonly sequenceLength: number },
): Plan {
	const { samples, microBatchSize, sequenceLength } = options;
	const refuse = (why: string): never => {
		throw new UserError(`Layout ${name}: ${why}`, exitCodes.usage);
	};
	const lanes = topology.language.lanes;
	if (samples % lanes !== 0) {
		refuse(`global-batch-size ${samples} cannot be dealt out to ${counted(lanes, "data lane")} of the language model.`);
	}
	const { shape, context } = topology.language;
	const shards = shape.tensor * context;
	const fits = (size: number) => (size * sequenceLength) % shards === 0;
	const sizes = divisors(samples / lanes).filter(fits);
	const best = sizes.find((size) => size >= microBatchSize) ?? sizes.at(-1);
	if (best === undefined) {
		const perLane = samples / lanes;
		return refuse(
			`no micro-batch size divides a lane's ${counted(perLane, "sample")} (global-batch-size ${samples}) and can be cut over ${counted(shards, "rank")}.`,
		);
	}
	return { name, topology, microBatchSize: best, microbatches: samples / lanes / best };
}

/** Throws a UserError for a layout whose microbatches are not those of `reference` where `reason` makes that another loss. */
export function requireEqualMicrobatches(plan: Plan, reference: Pick<Plan, "microBatchSize">, reason: string): void {
	const { name, microBatchSize } = plan;
	if (microBatchSize === reference.microBatchSize) return;
	throw new UserError(
		`Layout ${name} needs microbatches of ${counted(microBatchSize, "sample")} instead of ${reference.microBatchSize}: results depend on it, because ${reason}.`,
		2,
	);
}

/** Samples of microbatch m of a language lane. */
export function languageSamples<S>(plan: Plan, samples: readonly S[], lane: number, m: number): S[] {
	const { microBatchSize, microbatches } = plan;
	const first = (lane * microbatches + m) * microBatchSize;
	return samples.slice(first, first + microBatchSize);
}

const range = (count: number) => Array.from({ length: count }, (_, index) => index);

export function languageMicrobatches(plan: Plan, samples: readonly Sample[], lane: number): Microbatch[] {
	return range(plan.microbatches).map((m) => joinText(languageSamples(plan, samples, lane, m)));
}

/**
 * Microbatch m of a lane of an encoder: what it reads of microbatch m of every language lane it serves; where several encoder lanes
 * serve one language lane, its share of the samples.
 */
export function encoderMicrobatches(
	plan: Plan,
	samples: readonly Sample[],
	edge: FeatureEdge,
	lane: number,
): ImageSet[] {
	return range(plan.microbatches).map((m) =>
		joinSampleFeatures(encoderSamples(plan, samples, edge, lane, m), edge.encoder.name),
	);
}

/** Samples of microbatch m of a lane of an encoder. */
export function encoderSamples<S>(
	plan: Plan,
	samples: readonly S[],
	{ encoder, routes }: FeatureEdge,
	lane: number,
	m: number,
): S[] {
	const served = routes.filter(({ source }) => source === lane).map(({ destination }) => destination);
	const all = served.flatMap((destination) => languageSamples(plan, samples, destination, m));
	const count = Math.max(1, encoder.lanes / plan.topology.language.lanes);
	return shareOf(all, { index: lane % count, count }, m);
}

/** The microbatches of a rank: of each module that it runs its part. */
export function dealtTo(rank: number, plan: Plan, samples: readonly Sample[]): ImageTextMicrobatch[] {
	const { featureEdges, language } = plan.topology;
	const texts = language.contains(rank)
		? languageMicrobatches(plan, samples, language.coordinates(rank).dp)
		: range(plan.microbatches).map(() => noText);
	const read = featureEdges
		.filter(({ encoder }) => encoder.contains(rank))
		.map((edge) => {
			const { name } = edge.encoder;
			return [name, encoderMicrobatches(plan, samples, edge, edge.encoder.coordinates(rank).dp)] as const;
		});
	return texts.map((text, m) => ({ text, features: Object.fromEntries(read.map(([name, sets]) => [name, sets[m]!])) }));
}

/** Lanes of the vision encoder with an image in any microbatch of the step. `withImages`: which samples have one. */
export function participants(plan: Plan, withImages: readonly boolean[]): number {
	const edge = plan.topology.featureEdges.find(({ encoder }) => encoder.name === visionModule);
	if (edge === undefined) return withImages.includes(true) ? 1 : 0;
	return range(edge.encoder.lanes).filter((lane) =>
		range(plan.microbatches).some((m) => encoderSamples(plan, withImages, edge, lane, m).includes(true)),
	).length;
}

/** Values of a patch of one frame, as data have pictures, whatever number of frames the tower takes. */
function frameWidth({ patchSize }: VitConfig): number {
	return patchWidth({ patchSize, temporalPatch: 1 });
}
