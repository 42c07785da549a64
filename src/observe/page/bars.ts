/** Charts of values without steps: a heat map, and bars. */
import { largestOf } from "../extremes.ts";
import { type Html, html, nothing, numberText, place } from "./html.ts";

/** A heat map with a row of cells for each name; larger values are darker, and 1 is half dark. */
export function heatMap(rows: readonly { readonly name: string; readonly values: readonly number[] }[]): Html {
	const lines = rows.map(({ name, values }) => {
		const cells = values.map((value, index) => {
			const opacity = Math.min(1, Math.max(0.03, value / 2)).toFixed(2);
			return html`<rect x="${index}" width="1" height="1" fill-opacity="${opacity}"><title>${name}, expert ${index}: ${numberText(value)} × the mean</title></rect>`;
		});
		return html`<div class="heat"><span>${name}</span><svg viewBox="0 0 ${values.length} 1" preserveAspectRatio="none" role="img" aria-label="load of the experts of ${name}">${cells}</svg></div>`;
	});
	return html`${lines}`;
}

/** Bars with their names and values. */
export function bars(
	rows: readonly { readonly name: string; readonly value: number; readonly text: string; readonly inner?: number }[],
): Html {
	const most = Math.max(largestOf(rows.map(({ value }) => value)), 1);
	return html`${rows.map(({ name, value, text, inner }) => {
		const within = inner === undefined ? nothing : html`<div class="inner ${place(inner / most)}"></div>`;
		return html`<div class="bar"><span>${name}</span><div class="track"><div class="${place(value / most)}"></div>${within}</div><span>${text}</span></div>`;
	})}`;
}
