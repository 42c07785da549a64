/** The samples of a preview as one page without scripts or outside files. Pictures are what the encoder sees of them. */
import type { Images } from "../../native/images.ts";
import { type Html, html, htmlPage } from "../../observe/page/html.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import type { Tokenizer } from "../text/tokenizer.ts";
import type { EncodedSample } from "./batch.ts";
import { type PlannedImage, seenPictures } from "./pixels.ts";
import { encodePng } from "./png.ts";
import { headline, imageLines, type Span, spansOf } from "./preview.ts";
import type { VisionLanguageTask } from "./task.ts";

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
