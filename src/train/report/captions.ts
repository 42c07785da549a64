/** Decodes captions of held-out pictures over all grids and compares them with the true captions. */
import type { ImageSet } from "../../data/images.ts";
import { greedy } from "../../decode/sampling.ts";
import { drawPicture } from "../../observe/draw-picture.ts";
import { exchangeTexts } from "../../parallel/exchange-texts.ts";
import { counted } from "../../system/counted.ts";
import { decodingRanks, type Run } from "../assemble.ts";
import { type CaptionSource, dataPlaceOf } from "../feed/batch-source.ts";

export interface CaptionReport {
	/** Captions in lane order. */
	readonly read: readonly { readonly caption: string; readonly truth: string }[];
	/** Exact matches by the number of words of the true caption, ascending. */
	readonly kinds: readonly { readonly words: number; readonly right: number; readonly of: number }[];
	/** The first pictures, drawn in lines of text. */
	readonly drawings: readonly (readonly string[])[];
}

/** Number of pictures shown with their captions. */
const shown = 3;

/** A rank's part: texts on language ranks, pictures on encoder ranks. */
interface Part {
	readonly lane: number;
	readonly captions: readonly string[];
	readonly truths: readonly string[];
	readonly drawings: readonly (readonly string[])[];
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
	const { lanes, textLane, share } = dataPlaceOf(topology, rank);
	// Tensor-parallel ranks and stages hold the same captions, so one of them reports.
	const speaks = run.groups.language?.lane.rank === 0;
	const draws = run.encoder !== null && lanes[0] === 0 && share.index === 0;
	const part: Part = {
		lane: textLane ?? lanes[0]!,
		captions: speaks ? decoded.map((ids) => source.decode(ids)) : [],
		truths: speaks ? truths.map((ids) => source.decode(ids)) : [],
		drawings: draws ? drawImages(microbatches[0]!.images, source.patchSize) : [],
	};
	const parts = exchangeTexts(state.world, JSON.stringify(part))
		.map((text) => JSON.parse(text) as Part)
		.sort((a, b) => a.lane - b.lane);
	const read = parts.flatMap((one) => one.captions.map((caption, i) => ({ caption, truth: one.truths[i]! })));
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
		drawings: parts.find(({ drawings }) => drawings.length > 0)?.drawings ?? [],
	};
}

/** Draws the first image of each of the first samples; empty for a sample without one. */
function drawImages({ patches, grids, imagesPerSample }: ImageSet, patchSize: number): string[][] {
	const area = patchSize ** 2;
	const starts = [0];
	for (const { rows, columns } of grids) starts.push(starts.at(-1)! + rows * columns * 3 * area);
	let image = 0;
	return imagesPerSample.slice(0, shown).map((count) => {
		const first = image;
		image += count;
		if (count === 0) return [];
		const { rows, columns } = grids[first]!;
		// The red values of a patch come first.
		const valueAt = (y: number, x: number) => {
			const patch = Math.floor(y / patchSize) * columns + Math.floor(x / patchSize);
			return patches[starts[first]! + patch * 3 * area + (y % patchSize) * patchSize + (x % patchSize)]!;
		};
		const lines = drawPicture(rows * patchSize, columns * patchSize, valueAt);
		return lines.slice(Math.max(0, lines.findIndex(Boolean)), lines.findLastIndex(Boolean) + 1);
	});
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
