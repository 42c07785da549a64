/** Samples as they will be trained on, for people to look at: on a terminal or as a page. */
import type { Images } from "../../native/images.ts";
import { type Html, html, htmlPage } from "../../observe/page/html.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { type LoadOptions, loadDatasets } from "../energon/dataset.ts";
import type { ErrorHandler, Remark } from "../energon/errors.ts";
import type { Storage } from "../energon/storage/storage.ts";
import { buildTrain, collect } from "../energon/task-encoder.ts";
import { Worker } from "../energon/worker.ts";
import type { Tokenizer } from "../text/tokenizer.ts";
import { type EncodedSample, sampleName } from "./batch.ts";
import { checkTrainable } from "./dataset-checks.ts";
import { ignored } from "./encoding.ts";
import { planRows, type TowerGeometry } from "./image-plan.ts";
import { encodePng, type PlannedImage, seenPictures } from "./pixels.ts";
import { encodingSteps, type VisionLanguageTask } from "./task.ts";

export interface PreviewOptions {
	readonly path: string;
	readonly load: LoadOptions;
	readonly task: VisionLanguageTask;
	readonly seedOffset: number;
	readonly count: number;
	/** Receives samples that cannot be encoded. */
	readonly onFailure: ErrorHandler;
	/** Receives sentences about samples that are used nevertheless. */
	readonly remark: Remark;
}

/** The first samples of the first data worker of a run with one lane and one worker. */
export function previewSamples(
	storage: Storage,
	images: Images,
	tokenizer: Tokenizer,
	options: PreviewOptions,
): EncodedSample[] {
	const steps = encodingSteps(options.task, tokenizer, images, options.remark);
	const { mode, datasets } = loadDatasets(storage, options.path, steps.decode, {
		...options.load,
		tokensAtOnce: options.task.sequenceLength,
	});
	checkTrainable(datasets, options.task);
	const worker = new Worker(
		{
			rank: 0,
			worldSize: 1,
			numWorkers: 1,
			seedOffset: options.seedOffset,
			errorHandler: options.onFailure,
			restoreErrorHandler: options.onFailure,
		},
		0,
	);
	const pipeline = buildTrain(datasets, { ...steps, batch: collect }, worker, {
		blendMode: mode,
		repeat: mode === "weight",
		shuffleBufferSize: null,
		virtualEpochLength: 0,
		batchSize: null,
		batchDropLast: false,
		packingBufferSize: null,
	});
	const samples: EncodedSample[] = [];
	for (const item of pipeline.iterate()) {
		samples.push(item as unknown as EncodedSample);
		if (samples.length >= options.count) break;
	}
	return samples;
}

/** A run of tokens: text that counts in the loss or does not, or the rows of an image. */
export type Span =
	| { readonly text: string; readonly tokens: number; readonly loss: boolean }
	| { readonly image: number; readonly begin: number; readonly rows: number };

/** `spansOf` the tokens of a sample, in order. A token counts when it is the label of the one before it. */
export function spansOf(
	{ ids, labels, images }: EncodedSample,
	tokenizer: Tokenizer,
	task: Pick<VisionLanguageTask, "imageTokenId" | "tower">,
): Span[] {
	const spans: Span[] = [];
	const counts = (token: number) => token > 0 && labels[token - 1] !== ignored;
	// An image is one run of rows, or several with tags between its tiles.
	const missing = images.map(({ plan }) => planRows(plan, task.tower));
	for (let begin = 0; begin < ids.length; ) {
		let end = begin + 1;
		if (ids[begin] === task.imageTokenId) {
			while (end < ids.length && ids[end] === task.imageTokenId) end++;
			const image = missing.findIndex((rows) => rows > 0);
			const rows = Math.min(missing[image]!, end - begin);
			missing[image]! -= rows;
			spans.push({ image, begin, rows });
			begin += rows;
			continue;
		}
		while (end < ids.length && ids[end] !== task.imageTokenId && counts(end) === counts(begin)) end++;
		spans.push({ text: tokenizer.decode(ids.subarray(begin, end)), tokens: end - begin, loss: counts(begin) });
		begin = end;
	}
	return spans;
}

/** One line an image: its size, what it is resized to, where its rows go. */
export function imageLines({ images }: EncodedSample, spans: readonly Span[], { patchSize }: TowerGeometry): string[] {
	return images.map(({ width, height, orientation, decoding, plan }, image) => {
		const own = spans.filter((span) => "image" in span && span.image === image) as { begin: number; rows: number }[];
		const rowsOfAll = own.reduce((sum, { rows }) => sum + rows, 0);
		const last = own.at(-1)!;
		const { size, columns, rows, thumbnail } = plan;
		const tiles = columns * rows > 1 ? `, ${columns} x ${rows} tiles${thumbnail ? " and a thumbnail" : ""}` : "";
		const patches = `${Math.floor(size.width / patchSize)} x ${Math.floor(size.height / patchSize)} patches`;
		const turned = decoding === "transformers" ? "turned by" : "not turned by";
		const exif = orientation === 1 ? "" : ` (${turned} its EXIF orientation ${orientation})`;
		return `image ${image}: ${width} x ${height}${exif} -> ${size.width} x ${size.height} pixels, ${patches}${tiles}, ${counted(rowsOfAll, "row")} at tokens ${own[0]!.begin} to ${last.begin + last.rows - 1}`;
	});
}

/** Its headline: name, tokens, how many count. */
export function headline(sample: EncodedSample, sequenceLength: number): string {
	const inLoss = sample.labels.filter((label) => label !== ignored).length;
	return `${sampleName(sample)}: ${counted(sample.ids.length, "token")} of ${sequenceLength}, ${inLoss} in the loss`;
}

// The samples of a preview as one page without scripts or outside files. Pictures are what the encoder sees of them.

const style = `body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
article{border-top:1px solid #bbb;padding:1em 0}h2{font-size:1em;overflow-wrap:anywhere}
img{max-width:14em;max-height:14em;margin:0 .6em .6em 0;vertical-align:top}
.small{min-width:7em;image-rendering:pixelated}
p.tokens{white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace}
b{font-weight:inherit;background:#cdeccd}i{font-style:normal;background:#cfe0ff;border-radius:.3em;padding:0 .4em}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}b{background:#1d4d1d}i{background:#223a66}}`;

/** Pixels of the longer side below which a picture is enlarged. */
const smallest = 100;

export function previewPage(
	samples: readonly EncodedSample[],
	tokenizer: Tokenizer,
	task: VisionLanguageTask,
	images: Images,
): string {
	const articles = samples.map((sample) => {
		const spans = spansOf(sample, tokenizer, task);
		const lines = imageLines(sample, spans, task.tower).map((line) => html`<li>${line}</li>`);
		const pictures = sample.images.map((image, i) => picturesOf(image, `image ${i}`, task.tower.patchSize, images));
		return html`<article><h2>${headline(sample, task.sequenceLength)}</h2>
${pictures}
<ul>${lines}</ul>
<p class="tokens">${spans.map(markup)}</p></article>
`;
	});
	const body = html`<h1>Samples</h1><p><b>Marked text</b> counts in the loss; <i>image n</i> stands where its rows go.</p>
${articles}`;
	return htmlPage("Samples", { style, body });
}

function markup(span: Span): Html {
	if ("image" in span) return html`<i>image ${span.image}: ${counted(span.rows, "row")}</i>`;
	return span.loss ? html`<b>${span.text}</b>` : html`${span.text}`;
}

/** The pictures of an image, or why it has none. */
function picturesOf(image: PlannedImage, name: string, patchSize: number, images: Images): Html {
	try {
		const seen = seenPictures(images, image, patchSize);
		const drawn = seen.map((picture, i) => {
			const url = `data:image/png;base64,${encodePng({ ...picture, channels: 3 }).toString("base64")}`;
			const size = Math.max(picture.width, picture.height) < smallest ? "small" : "";
			return html`<img class="${size}" alt="${name}${seen.length > 1 ? `, tile ${i}` : ""}" src="${url}">`;
		});
		return html`${drawn}`;
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		return html`<p>${name}: ${error.message}</p>`;
	}
}
