/** Charts of values without steps: a heat map, and bars. */
import { escapeHtml, numberText } from "./html.ts";

/** A heat map with a row of cells for each name; larger values are darker, and 1 is half dark. */
export function heatMap(rows: readonly { readonly name: string; readonly values: readonly number[] }[]): string {
	const lines = rows.map(({ name, values }) => {
		const cells = values
			.map((value, index) => {
				const opacity = Math.min(1, Math.max(0.03, value / 2)).toFixed(2);
				return `<rect x="${index}" width="1" height="1" fill-opacity="${opacity}"><title>${escapeHtml(name)}, expert ${index}: ${numberText(value)} × the mean</title></rect>`;
			})
			.join("");
		return `<div class="heat"><span>${escapeHtml(name)}</span><svg viewBox="0 0 ${values.length} 1" preserveAspectRatio="none" role="img" aria-label="load of the experts of ${escapeHtml(name)}">${cells}</svg></div>`;
	});
	return lines.join("");
}

/** Bars with their names and values. */
export function bars(
	rows: readonly { readonly name: string; readonly value: number; readonly text: string; readonly inner?: number }[],
): string {
	const most = Math.max(...rows.map(({ value }) => value), 1);
	const share = (value: number) => `${((100 * value) / most).toFixed(1)}%`;
	return rows
		.map(
			({ name, value, text, inner }) =>
				`<div class="bar"><span>${escapeHtml(name)}</span><div class="track"><div style="width:${share(value)}"></div>${inner === undefined ? "" : `<div class="inner" style="width:${share(inner)}"></div>`}</div><span>${escapeHtml(text)}</span></div>`,
		)
		.join("");
}
