/** Decodes captions of held-out pictures over all grids and compares them with the true captions. */
import { featuresOf, type ImageTextMicrobatch } from "../../data/microbatch.ts";
import { samplesOfShares } from "../../data/routing/image-share.ts";
import { encodePng, pictureOf, thumbnailOf } from "../../data/vision-language/pixels.ts";
import { greedy } from "../../decode/sampling.ts";
import type { Image } from "../../native/images.ts";
import { mostSamples, type SampleRecord } from "../../observe/run-log/writer.ts";
import { exchangeTexts, visionModule } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { decodingRanks, type Run } from "../assemble.ts";
import { type CaptionSource, type DataPlace, dataPlaceOf } from "../feed/batch-source.ts";

export interface CaptionReport {
	/** Captions in lane order. */
	readonly read: readonly { readonly caption: string; readonly truth: string }[];
	/** Exact matches by the number of words of the true caption, ascending. */
	readonly kinds: readonly { readonly words: number; readonly right: number; readonly of: number }[];
	/** The first pictures, drawn in lines of text. */
	readonly drawings: readonly (readonly string[])[];
	/** The first samples, for the log. */
	readonly samples: readonly SampleRecord[];
}

/** Number of pictures shown with their captions. */
const shown = 3;
/** Pixels of the longer side of a picture in the log. */
const thumbnailSide = 112;

/** A rank's part: texts on language ranks, pictures on encoder ranks. */
interface Part {
	readonly lane: number;
	readonly captions: readonly string[];
	readonly truths: readonly string[];
	/** Prompts of the first samples of the first lane, and those of their pictures that this rank encodes. */
	readonly prompts: readonly string[];
	readonly pictures: readonly Picture[];
}

interface Picture {
	/** Place of its sample in the lane. */
	readonly place: number;
	/** In lines of text; empty behind the first samples. */
	readonly drawing: readonly string[];
	/** A PNG file in base64. */
	readonly png: string;
}

/** Collective over the run; every rank returns the report. */
export async function readCaptions(run: Run, source: CaptionSource): Promise<CaptionReport> {
	const { state, topology, rank } = run;
	const { microbatches, truths } = await source.prompts();
	const longest = Math.max(0, ...truths.map(({ length }) => length));
	const most = 1 + Math.max(...state.world.exchange(Int32Array.of(longest)).map(([length]) => length!));
	const options = { endIds: [source.endId], most, sampling: greedy };
	const decoded = microbatches.flatMap(
		(prompts, turn) => state.passes.decode(prompts, options, decodingRanks(run), undefined, turn)?.ids ?? [],
	);
	const place = dataPlaceOf(topology, rank);
	// Tensor-parallel ranks and stages hold the same captions, so one of them reports.
	const speaks = run.languageGroups?.lane.rank === 0;
	const lane = place.textLane ?? place.lanes[0]!;
	const draws = run.encoder?.segment.embeds === true && place.lanes[0] === 0;
	const part: Part = {
		lane,
		captions: speaks ? decoded.map((ids) => source.decode(ids)) : [],
		truths: speaks ? truths.map((ids) => source.decode(ids)) : [],
		prompts: speaks && lane === 0 ? firstPrompts(microbatches, source) : [],
		pictures: draws ? firstPictures(microbatches, source, place) : [],
	};
	const parts = exchangeTexts(state.world, JSON.stringify(part))
		.map((text) => JSON.parse(text) as Part)
		.sort((a, b) => a.lane - b.lane);
	const read = parts.flatMap((one) => one.captions.map((caption, i) => ({ caption, truth: one.truths[i]! })));
	const pictures = new Map(parts.flatMap((one) => one.pictures.map((picture) => [picture.place, picture] as const)));
	const kinds = Map.groupBy(read, ({ truth }) => truth.split(" ").length);
	return {
		read,
		kinds: [...kinds]
			.map(([words, list]) => ({
				words,
				right: list.filter(({ caption, truth }) => caption === truth).length,
				of: list.length,
			}))
			.sort((a, b) => a.words - b.words),
		drawings: Array.from({ length: shown }, (_, i) => pictures.get(i)?.drawing ?? []),
		samples: parts
			.flatMap(({ prompts }) => prompts)
			.map((prompt, i) => {
				const { caption, truth } = read[i]!;
				return { picture: pictures.get(i)?.png ?? null, prompt, truth, answer: caption };
			}),
	};
}

/** The first picture of each of the first lane's first samples, as far as this rank encodes it. */
function firstPictures(
	microbatches: readonly ImageTextMicrobatch[],
	{ patchSize, statistics, microbatchSize }: CaptionSource,
	{ lanes, share }: DataPlace,
): Picture[] {
	const pictures: Picture[] = [];
	for (const [turn, batch] of microbatches.entries()) {
		const { patches, grids, imagesPerSample } = featuresOf(batch, visionModule);
		const starts = [0];
		for (const { rows, columns } of grids) starts.push(starts.at(-1)! + rows * columns * 3 * patchSize ** 2);
		const before = samplesOfShares(microbatchSize, share.count, turn).slice(0, share.index);
		let place = before.reduce((sum, count) => sum + count, turn * microbatchSize);
		let image = 0;
		// Those of a further lane come after the first lane's.
		for (const count of imagesPerSample.slice(0, imagesPerSample.length / lanes.length)) {
			if (place >= mostSamples) break;
			if (count > 0) {
				const values = patches.subarray(starts[image]!, starts[image + 1]!);
				const picture = pictureOf(values, grids[image]!, patchSize, statistics);
				const png = encodePng(thumbnailOf(picture, thumbnailSide)).toString("base64");
				pictures.push({ place, drawing: place < shown ? drawingOf(picture) : [], png });
			}
			image += count;
			place++;
		}
	}
	return pictures;
}

/** The text of the first samples' prompts, without image rows and special tokens. */
function firstPrompts(microbatches: readonly ImageTextMicrobatch[], source: CaptionSource): string[] {
	const prompts: string[] = [];
	for (const { text } of microbatches) {
		let begin = 0;
		for (const length of text.lengths) {
			const ids = [...text.ids.subarray(begin, begin + length)];
			begin += length;
			const own = ids.filter((id) => !source.isMarkup(id));
			prompts.push(own.length === 0 ? "" : source.decode(own).trim());
			if (prompts.length === mostSamples) return prompts;
		}
	}
	return prompts;
}

/** A picture in lines of text, by its red values. */
function drawingOf({ width, height, pixels }: Image): string[] {
	const lines = drawPicture(height, width, (y, x) => pixels[3 * (y * width + x)]!);
	return lines.slice(Math.max(0, lines.findIndex(Boolean)), lines.findLastIndex(Boolean) + 1);
}

/** Largest number of caption lengths that the report lists. */
const mostKinds = 8;

/** The report as lines of text. */
export function describeCaptions({ read, kinds, drawings }: CaptionReport): string[] {
	const right = kinds.reduce((sum, kind) => sum + kind.right, 0);
	const share = (part: { readonly right: number; readonly of: number }) =>
		`${((100 * part.right) / part.of).toFixed(1)} %`;
	const list = kinds.map((kind) => `${counted(kind.words, "word")} ${share(kind)} of ${kind.of}`);
	const details = kinds.length > mostKinds ? "" : ` (${list.join(", ")})`;
	return [
		`Captions of ${read.length} held-out pictures, decoded greedily: exactly right ${share({ right, of: read.length })}${details}.`,
		...read
			.slice(0, shown)
			.flatMap(({ caption, truth }, i) => [
				...(drawings[i] ?? []),
				`read: ${caption}${caption === truth ? "" : ` (it says ${truth})`}`,
			]),
	];
}

// Draws pictures with characters, for terminals.

/** Characters from dark to light. */
const shades = " .:-=+*#%@";

/**
 * The lines of a grey picture, scaled to its range of values, where a character covers two columns of four rows. `valueAt`: the
 * value of a pixel, any finite number; pixels outside are dark.
 */
export function drawPicture(height: number, width: number, valueAt: (row: number, column: number) => number): string[] {
	const values = Array.from({ length: height * width }, (_, i) => valueAt(Math.floor(i / width), i % width));
	const low = values.reduce((a, b) => Math.min(a, b), Number.POSITIVE_INFINITY);
	const range = values.reduce((a, b) => Math.max(a, b), low) - low || 1;
	const shade = (row: number, column: number) => {
		let sum = 0;
		for (let y = row; y < Math.min(row + 4, height); y++) {
			for (let x = column; x < Math.min(column + 2, width); x++) sum += (values[y * width + x]! - low) / range;
		}
		return shades[Math.min(shades.length - 1, Math.floor((sum / 8) * shades.length))]!;
	};
	return Array.from({ length: Math.ceil(height / 4) }, (_, line) =>
		Array.from({ length: Math.ceil(width / 2) }, (_, at) => shade(4 * line, 2 * at))
			.join("")
			.trimEnd(),
	);
}
