/** The samples of a preview as one page without scripts or outside files. */
import { counted } from "../../system/counted.ts";
import type { Tokenizer } from "../text/tokenizer.ts";
import type { EncodedSample } from "./batch.ts";
import { headline, imageLines, type Span, spansOf } from "./preview.ts";
import type { VisionLanguageTask } from "./task.ts";

const style = `body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
article{border-top:1px solid #bbb;padding:1em 0}h2{font-size:1em;overflow-wrap:anywhere}
img{max-width:14em;max-height:14em;margin:0 .6em .6em 0;vertical-align:top}
p.tokens{white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace}
b{font-weight:inherit;background:#cdeccd}i{font-style:normal;background:#cfe0ff;border-radius:.3em;padding:0 .4em}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}b{background:#1d4d1d}i{background:#223a66}}`;

export function previewPage(samples: readonly EncodedSample[], tokenizer: Tokenizer, task: VisionLanguageTask): string {
	const articles = samples.map((sample) => {
		const spans = spansOf(sample, tokenizer, task);
		const lines = imageLines(sample, spans, task.tower).map((line) => `<li>${escapeHtml(line)}</li>`);
		const pictures = sample.images.map(({ file }, i) => `<img alt="image ${i}" src="${dataUrl(file)}">`);
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

function dataUrl(file: Uint8Array): string {
	const kind = file[0] === 0x89 ? "png" : "jpeg";
	return `data:image/${kind};base64,${Buffer.from(file).toString("base64")}`;
}

function escapeHtml(text: string): string {
	return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}
