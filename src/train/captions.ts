/** Captions of held-out pictures, decoded over all grids and compared with the true ones. */
import { exchangeTexts } from "../parallel/exchange-texts.ts";
import type { CaptionSource } from "./batch-source.ts";
import type { TrainingRun } from "./training-run.ts";

export interface CaptionReport {
	/** By number of the picture. */
	readonly read: readonly { readonly number: number; readonly caption: string; readonly truth: string }[];
	/** Exactly right ones by kind of picture, in order of their names. */
	readonly kinds: readonly { readonly kind: string; readonly right: number; readonly of: number }[];
}

/** Every rank of the run calls this together, and all get the report. */
export async function readCaptions<Batch>(run: TrainingRun<Batch>, source: CaptionSource): Promise<CaptionReport> {
	const { state, topology, rank } = run;
	const prompts = (await source.prompts.microbatches(null)).map((one) => run.batchOf(one));
	const decoded = state.schedule.decode(prompts, {
		endId: source.endId,
		most: source.longest,
		group: state.routerGroup,
	});
	const captions = decoded.map((ids) => source.decode(ids));
	// Tensor-parallel ranks have read the same.
	const speaks = run.language !== null && topology.language.coordinates(rank).tp === 0;
	const lane = speaks ? topology.language.coordinates(rank).dp : -1;
	const lanes = exchangeTexts(state.world, JSON.stringify(speaks ? { lane, captions } : null))
		.map((text) => JSON.parse(text) as { lane: number; captions: string[] } | null)
		.filter((found) => found !== null)
		.sort((a, b) => a.lane - b.lane);
	const read = lanes
		.flatMap((found) => found.captions)
		.map((caption, number) => ({ number, caption, truth: source.captionOf(number).text }));
	const kinds = Map.groupBy(read, ({ number }) => source.captionOf(number).kind);
	return {
		read,
		kinds: [...kinds]
			.map(([kind, list]) => ({
				kind,
				right: list.filter(({ caption, truth }) => caption === truth).length,
				of: list.length,
			}))
			.sort((a, b) => a.kind.localeCompare(b.kind)),
	};
}

/** Pictures shown with what was read. */
const shown = 3;

/** The report in lines. */
export function describeCaptions({ read, kinds }: CaptionReport, source: CaptionSource): string[] {
	const right = kinds.reduce((sum, kind) => sum + kind.right, 0);
	const share = (part: { readonly right: number; readonly of: number }) =>
		`${((100 * part.right) / part.of).toFixed(1)} %`;
	const list = kinds.map((kind) => `${kind.kind} ${share(kind)} of ${kind.of}`).join(", ");
	return [
		`Captions of ${read.length} held-out pictures, decoded greedily: exactly right ${share({ right, of: read.length })} (${list}).`,
		...read
			.slice(0, shown)
			.flatMap(({ number, caption, truth }) => [
				...source.draw(number),
				`read: ${caption}${caption === truth ? "" : ` (it says ${truth})`}`,
			]),
	];
}
