/**
 * Megatron's mock data (docs/spec/runtime.md §8): samples of image tokens followed by random text, images of zeros.
 * Sample i of a data set is drawn from MT19937 seeded by the data set's seed plus i.
 */
import { hasEncoder } from "../config/derive.ts";
import { modulesOf } from "../config/modules.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { PatchGrid } from "../models/tower.ts";
import { encoderConfig } from "../models/vision/from-configuration.ts";
import { outputRows } from "../models/vit/config.ts";
import { visionModule } from "../parallel/index.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { MersenneTwister, seedByInteger } from "./energon/random/mersenne-twister.ts";
import type { ImageSet } from "./images.ts";
import { type ImageTextMicrobatch, type Microbatch, mediaPositions, noText } from "./microbatch.ts";

export interface MockOptions {
	/** datasetSeed() of the lane that reads it. */
	readonly seed: number;
	/** Samples it has. */
	readonly size: number;
	readonly sequenceLength: number;
	readonly vocabularySize: number;
	readonly imageTokenId: number;
	/** Image tokens every sample begins with. */
	readonly imageTokens: number;
	/** The pictures that they are of, where tokens have positions by them; default: they have their places alone. */
	readonly pictures?: { readonly grids: readonly PatchGrid[]; readonly merge: number } | null;
	/** Tokens of further encoders, which follow them; default: none. */
	readonly placeholders?: readonly { readonly id: number; readonly count: number }[];
}

const padId = 0;
const ignored = -100;

/** Encoder and language ranks read independent data sets; every data-parallel rank its own. */
export function datasetSeed(
	seed: number,
	role: "encoder" | "language",
	lane: number,
	split: "train" | "valid" | "test",
): number {
	const [roles, splits] = [
		{ encoder: 10000, language: 20000 },
		{ train: 0, valid: 100000, test: 200000 },
	];
	return seed + roles[role] + lane + splits[split];
}

/** Grid of a mock image of `patches` patches: nearest to square with rows ≤ columns, both even for pixel shuffle. */
export function mockGrid(patches: number, pixelShuffle: boolean): PatchGrid {
	const fits = (rows: number) =>
		patches % rows === 0 && (!pixelShuffle || (rows % 2 === 0 && (patches / rows) % 2 === 0));
	for (let rows = Math.floor(Math.sqrt(patches)); rows > 0; rows--) {
		if (fits(rows)) return { rows, columns: patches / rows };
	}
	throw new UserError(`No grid of ${patches} patches has an even number of rows and of columns.`);
}

export class MockData {
	/** Token ids that text is drawn from, ascending. */
	readonly #text: Int32Array;
	/** Ids that every sample begins with. */
	readonly #prefix: readonly number[];

	constructor(readonly options: MockOptions) {
		const { vocabularySize, imageTokenId, imageTokens, sequenceLength, placeholders = [] } = options;
		this.#prefix = [{ id: imageTokenId, count: imageTokens }, ...placeholders].flatMap(({ id, count }) =>
			new Array<number>(count).fill(id),
		);
		const all = this.#prefix.length;
		if (all >= sequenceLength) {
			const what = placeholders.length === 0 ? "image" : "placeholder";
			throw new UserError(`${all} ${what} tokens leave no text in samples of seq-length ${sequenceLength}.`);
		}
		this.#text = new Int32Array(vocabularySize);
		let ids = 0;
		for (let id = 0; id < vocabularySize; id++) {
			if (id !== padId && id !== imageTokenId && placeholders.every((one) => one.id !== id)) this.#text[ids++] = id;
		}
		this.#text = this.#text.subarray(0, ids);
		if (this.#text.length === 0) throw new UserError(`A vocabulary of ${vocabularySize} has no id for mock text.`);
	}

	/** Samples first … first + count − 1 as one microbatch. */
	microbatch(first: number, count: number): Microbatch {
		const { size, sequenceLength, imageTokenId } = this.options;
		if (first + count > size) {
			throw new UserError(
				`Mock data has ${counted(size, "sample")} (mock-dataset-size); sample ${first + count - 1} is asked for.`,
			);
		}
		const ids = new Int32Array(count * sequenceLength);
		const labels = new Int32Array(ids.length).fill(ignored);
		for (let sample = 0; sample < count; sample++) {
			const begin = sample * sequenceLength;
			ids.set(this.#ids(first + sample), begin);
			labels.set(ids.subarray(begin + 1, begin + sequenceLength), begin);
		}
		const rows = new Set([imageTokenId, ...(this.options.placeholders ?? []).map(({ id }) => id)]);
		for (const [token, label] of labels.entries()) if (rows.has(label)) labels[token] = ignored;
		const lossMask = Float32Array.from(labels, (label) => (label === ignored ? 0 : 1));
		const text = { ids, labels, lossMask, lengths: new Array<number>(count).fill(sequenceLength) };
		const { pictures } = this.options;
		if (!pictures) return text;
		const grids = new Array(count).fill(pictures.grids).flat();
		const positions = mediaPositions(text, grids, { placeholder: imageTokenId, merge: pictures.merge });
		return { ...text, ...(positions && { positions }) };
	}

	#ids(sample: number): Int32Array {
		const { seed, sequenceLength } = this.options;
		const ids = new Int32Array(sequenceLength);
		ids.set(this.#prefix);
		const random = new MersenneTwister(seedByInteger(seed + sample));
		for (let token = this.#prefix.length; token < sequenceLength; token++) {
			ids[token] = this.#text[random.u32() % this.#text.length]!;
		}
		return ids;
	}
}

/** Images of zeros of these grids for each of `samples` samples. `patchWidth`: values of a patch. */
export function mockImages(samples: number, grids: readonly PatchGrid[], patchWidth: number): ImageSet {
	return {
		patches: new Float32Array(samples * patchCount(grids) * patchWidth),
		grids: new Array(samples).fill(grids).flat(),
		imagesPerSample: new Array<number>(samples).fill(grids.length),
	};
}

export function patchCount(grids: readonly PatchGrid[]): number {
	return grids.reduce((sum, { rows, columns }) => sum + rows * columns, 0);
}

/** Mock samples of both modules: every lane has its own, text and images do not know each other. */
export function mockData(c: TrainingConfiguration, split: "train" | "valid" | "test") {
	const { grid, tokens } = mockImage(c);
	// All images are alike: hundreds of megabytes of new zeros a step would keep the collector busy.
	const images = new Map<number, ImageSet>();
	const imagesOf = (count: number): ImageSet => {
		const known = images.get(count) ?? mockImages(count, [grid], 3 * c.patchDim ** 2);
		images.set(count, known);
		return { ...known };
	};
	const lanes = new Map<number, MockData>();
	const open = (lane: number) => {
		const known = lanes.get(lane);
		if (known) return known;
		const opened = new MockData({
			seed: datasetSeed(c.seed, "language", lane, split),
			size: c.mockDatasetSize,
			sequenceLength: c.seqLength,
			vocabularySize: c.vocabSize,
			imageTokenId: c.imageTokenId,
			imageTokens: tokens,
			pictures: picturesOf(c, [grid]),
			placeholders: placeholdersOf(c),
		});
		lanes.set(lane, opened);
		return opened;
	};
	return {
		microbatch: (
			{ lane, firstOfLane, count }: { readonly lane: number; readonly firstOfLane: number; readonly count: number },
			wants: { readonly wantsText: boolean; readonly features: Readonly<Record<string, unknown>> },
		): ImageTextMicrobatch => ({
			text: wants.wantsText ? open(lane).microbatch(firstOfLane, count) : noText,
			features: visionModule in wants.features ? { [visionModule]: imagesOf(count) } : {},
		}),
	};
}

/** The pictures by which tokens have positions; null: they have their places alone. */
export function picturesOf(
	c: TrainingConfiguration,
	grids: readonly PatchGrid[],
): NonNullable<MockOptions["pictures"]> | null {
	return hasEncoder(c) && c.mropeSection !== null ? { grids, merge: c.pixelShuffle ? 2 : 1 } : null;
}

/** Placeholder tokens of a sample for the encoders of `modules`. */
export function placeholdersOf(c: TrainingConfiguration): { readonly id: number; readonly count: number }[] {
	return modulesOf(c).map(({ placeholderTokenId: id, frames: count }) => ({ id, count }));
}

/** The one image of a mock sample, and how many image tokens it makes (docs/spec/runtime.md §8). */
export function mockImage(c: TrainingConfiguration): { readonly grid: PatchGrid; readonly tokens: number } {
	if (!hasEncoder(c)) return { grid: { rows: 0, columns: 0 }, tokens: 0 };
	const { tower } = encoderConfig(c);
	if (c.dynamicResolution) {
		const tokens = c.imageSeqLength ?? Math.floor(c.seqLength / 2);
		const classTokens = outputRows(tower, { rows: 0, columns: 0 });
		if (tokens <= classTokens) {
			throw new UserError(`${tokens} image tokens leave no patches beside ${classTokens} class tokens.`);
		}
		return { grid: mockGrid((tokens - classTokens) * (c.pixelShuffle ? 4 : 1), c.pixelShuffle), tokens };
	}
	const grid = { rows: Math.floor(c.imgH / c.patchDim), columns: Math.floor(c.imgW / c.patchDim) };
	if (c.pixelShuffle && (grid.rows % 2 !== 0 || grid.columns % 2 !== 0)) {
		throw new UserError(
			`--pixel-shuffle needs an even number of rows and of columns of patches; img-h × img-w and patch-dim make ${grid.rows} × ${grid.columns}.`,
		);
	}
	const tokens = outputRows(tower, grid) + Number(c.visionImageNewline);
	if (c.imageSeqLength !== null && c.imageSeqLength !== tokens) {
		throw new UserError(
			`image-seq-length is ${c.imageSeqLength}, but an image of img-h × img-w makes ${tokens} image tokens.`,
		);
	}
	return { grid, tokens };
}

/** Images of a sample, and how many image tokens they make. */
export interface MockSample {
	readonly grids: readonly PatchGrid[];
	readonly tokens: number;
}

/** Patches of a photograph's row, and of its column. */
const photographSide = 32;

/**
 * The sequence of packed samples that needs most memory: all of its tokens but the last are of images, as far as packing-max-patches
 * allows; with dynamic resolution of squares of 1,024 patches, and smaller ones in the rest. null: sequences are not packed, or have
 * no images.
 */
export function fullestSample(c: TrainingConfiguration): MockSample | null {
	const packs = c.datasetProvider === "energon" && (c.packingBufferSize ?? c.packingMaxPatches) !== null;
	if (!packs || !hasEncoder(c)) return null;
	const imageWithin = c.dynamicResolution ? squareWithin(c) : () => mockImage(c);
	const grids: PatchGrid[] = [];
	let tokens = 0;
	const most = placeholdersOf(c).reduce((room, { count }) => room - count, c.seqLength - 1);
	for (;;) {
		const patches = (c.packingMaxPatches ?? Number.POSITIVE_INFINITY) - patchCount(grids);
		const image = imageWithin(most - tokens, patches);
		const own = patchCount([image.grid]);
		if (own === 0 || own > patches || tokens + image.tokens > most) return { grids, tokens };
		grids.push(image.grid);
		tokens += image.tokens;
	}
}

/** The largest square up to a photograph's within so many tokens and patches. */
function squareWithin(c: TrainingConfiguration): (tokens: number, patches: number) => ReturnType<typeof mockImage> {
	const { tower } = encoderConfig(c);
	const unit = c.pixelShuffle ? 2 : 1;
	return (tokens, patches) => {
		const held = (tokens - outputRows(tower, { rows: 0, columns: 0 })) * unit ** 2;
		const side = unit * Math.floor(Math.sqrt(Math.max(0, Math.min(held, patches))) / unit);
		const grid = { rows: Math.min(side, photographSide), columns: Math.min(side, photographSide) };
		return { grid, tokens: outputRows(tower, grid) };
	};
}
