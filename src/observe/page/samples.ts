/** Held-out pictures with the answers of the data and of the model. */
import type { RunLog } from "../run-log/reader.ts";
import type { SampleRecord } from "../run-log/samples.ts";
import { type Html, html, nothing, section } from "./html.ts";

export function sampleSection({ samples }: RunLog): Html {
	if (samples === null || samples.records.length === 0) return nothing;
	const { step, sentence, records } = samples;
	const cards = html`<div class="samples">${records.map(card)}</div>`;
	return section(`Held-out samples after step ${step}`, html`<p>${sentence}</p>${cards}`, { wide: true });
}

function card({ picture, prompt, truth, answer }: SampleRecord): Html {
	const seen =
		picture === null ? nothing : html`<img alt="picture of the sample" src="data:image/png;base64,${picture}">`;
	const isRight = answer.trim() === truth.trim();
	const asked = prompt.trim() === "" ? nothing : html`<p>${prompt.trim().replaceAll(/\s*\n\s*/g, "\n")}</p>`;
	const expected = isRight ? nothing : html`<p>data: <b>${truth.trim()}</b></p>`;
	const said = answer.trim() === "" ? "(nothing)" : answer.trim();
	return html`<figure>${seen}<figcaption>${asked}<p class="${isRight ? "right" : "wrong"}">model: <b>${said}</b></p>${expected}</figcaption></figure>`;
}
