/** The samples of a preview as one page without scripts or outside files. Pictures are what the encoder sees of them. */
import type { Images } from "../../native/images.ts";
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
p.tokens{white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace}
b{font-weight:inherit;background:#cdeccd}i{font-style:normal;background:#cfe0ff;border-radius:.3em;padding:0 .4em}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}b{background:#1d4d1d}i{background:#223a66}}`;

export function previewPage(
	samples: readonly EncodedSample[],
	tokenizer: Tokenizer,
	task: VisionLanguageTask,
	images: Images,
): string {
	const articles = samples.map((sample) => {
		const spans = spansOf(sample, tokenizer, task);
		const lines = imageLines(sample, spans, task.tower).map((line) => `<li>${escapeHtml(line)}</li>`);
		const pictures = sample.images.map((image, i) => picturesOf(image, `image ${i}`, task.tower.patchSize, images));
		return `<article><h2>${escapeHtml(headline(sample, task.sequenceLength))}</h2>
${pictures.join("")}
<ul>${lines.join("")}</ul>
<p class="tokens">${spans.map(markup).join("")}</p></article>`;
	});
	return `<!doctype html><html lang="en"><meta charset="utf-8"><title>Samples</title><style>${style}</style>
<h1>Samples</h1><p><b>Marked text</b> counts in the loss; <i>image n</i> stands where its rows go.</p>
${articles.join("\n")}</html>
`;
}

function markup(span: Span): string {
	if ("image" in span) return `<i>image ${span.image}: ${counted(span.rows, "row")}</i>`;
	return span.loss ? `<b>${escapeHtml(span.text)}</b>` : escapeHtml(span.text);
}

/** The pictures of an image, or why it has none. */
function picturesOf(image: PlannedImage, name: string, patchSize: number, images: Images): string {
	try {
		const seen = seenPictures(images, image, patchSize);
		return seen
			.map((picture, i) => {
				const url = `data:image/png;base64,${encodePng({ ...picture, channels: 3 }).toString("base64")}`;
				return `<img alt="${name}${seen.length > 1 ? `, tile ${i}` : ""}" src="${url}">`;
			})
			.join("");
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		return `<p>${name}: ${escapeHtml(error.message)}</p>`;
	}
}

function escapeHtml(text: string): string {
	return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}
