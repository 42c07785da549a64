/**
 * Charts as SVG that stretches with the page: shapes alone are in the SVG, every word around it is HTML, so that letters
 * keep their size on a phone.
 */
import type { Series } from "../series.ts";
import { escapeHtml, numberText } from "./html.ts";

/** Units of a drawing. */
const [width, height] = [1000, 300];

export interface Mark {
	readonly step: number;
	readonly kind: string;
	readonly sentence: string;
}

interface Scale {
	readonly low: number;
	readonly high: number;
}

/** Round numbers around [low, high] and the values that lines are drawn at. */
export function ticks(low: number, high: number, count = 4): number[] {
	const span = high - low || Math.abs(high) || 1;
	const rough = span / count;
	const power = 10 ** Math.floor(Math.log10(rough));
	const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough)!;
	const first = Math.floor(low / step + 1e-9);
	const last = Math.ceil(high / step - 1e-9);
	return Array.from({ length: Math.max(1, last - first) + 1 }, (_, i) => (first + i) * step);
}

function stepScale(series: readonly Series[]): Scale {
	const bins = series.flatMap(({ bins }) => (bins.length > 0 ? [bins[0]!, bins.at(-1)!] : []));
	const low = Math.min(...bins.map(({ first }) => first));
	const high = Math.max(...bins.map(({ last }) => last));
	return { low, high: high === low ? low + 1 : high };
}

const place = ({ low, high }: Scale, value: number, size: number) => ((value - low) / (high - low)) * size;
const x = (scale: Scale, step: number) => place(scale, step, width).toFixed(1);
const y = (scale: Scale, value: number) => (height - place(scale, value, height)).toFixed(1);

function grid(levels: readonly number[], scale: Scale): string {
	return levels
		.map((level) => `<line class="grid" x1="0" x2="${width}" y1="${y(scale, level)}" y2="${y(scale, level)}"/>`)
		.join("");
}

function marks(events: readonly Mark[], steps: Scale): string {
	return events
		.filter(({ step }) => step >= steps.low && step <= steps.high)
		.map(({ step, kind, sentence }) => {
			const at = x(steps, step);
			return `<line class="mark ${kind.replaceAll(" ", "-")}" x1="${at}" x2="${at}" y1="0" y2="${height}"><title>step ${step}: ${escapeHtml(sentence || kind)}</title></line>`;
		})
		.join("");
}

/** A drawing between its axes. */
function frame(
	drawing: string,
	axes: { readonly levels: readonly number[]; readonly steps: Scale; readonly unit: string; readonly label: string },
): string {
	const { levels, steps, unit, label } = axes;
	const middle = Math.round((steps.low + steps.high) / 2);
	return `<div class="chart"><div class="levels">${levels
		.toReversed()
		.map((level) => `<span>${numberText(level)}${unit}</span>`)
		.join(
			"",
		)}</div><svg viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" role="img" aria-label="${escapeHtml(label)}">${drawing}</svg><div class="steps"><span>${numberText(steps.low)}</span><span>step ${numberText(middle)}</span><span>${numberText(steps.high)}</span></div></div>`;
}

/** Means of a series as a line, with the band of its bins' extremes; null without values. */
export function lineChart(
	series: Series,
	options: {
		readonly label: string;
		readonly unit?: string;
		readonly marks?: readonly Mark[];
		readonly colour?: number;
	},
): string | null {
	const { bins } = series;
	if (bins.length === 0) return null;
	const levels = ticks(Math.min(...bins.map(({ least }) => least)), Math.max(...bins.map(({ most }) => most)));
	const scale = { low: levels[0]!, high: levels.at(-1)! };
	const steps = stepScale([series]);
	const at = (bin: (typeof bins)[number]) => x(steps, (bin.first + bin.last) / 2);
	const line = bins.map((bin) => `${at(bin)},${y(scale, bin.sum / bin.count)}`).join(" ");
	const upper = bins.map((bin) => `${at(bin)},${y(scale, bin.most)}`);
	const lower = bins.toReversed().map((bin) => `${at(bin)},${y(scale, bin.least)}`);
	const colour = `c${options.colour ?? 0}`;
	const drawing = `${grid(levels, scale)}<polygon class="band ${colour}" points="${upper.join(" ")} ${lower.join(" ")}"/><polyline class="line ${colour}" points="${line}"/>${marks(options.marks ?? [], steps)}`;
	return frame(drawing, { levels, steps, unit: options.unit ?? "", label: options.label });
}

/** Series on top of each other, the first at the bottom; they have values at the same steps. */
export function stackedChart(
	parts: readonly (readonly [name: string, series: Series])[],
	options: { readonly label: string; readonly unit: string; readonly marks?: readonly Mark[] },
): string | null {
	const bins = parts[0]?.[1].bins ?? [];
	if (bins.length === 0) return null;
	const heights = bins.map((_, bin) => parts.map(([, series]) => meanOf(series, bin)));
	const totals = heights.map((values) => values.reduce((sum, value) => sum + value, 0));
	const levels = ticks(0, Math.max(...totals));
	const scale = { low: 0, high: levels.at(-1)! };
	const steps = stepScale([parts[0]![1]]);
	let base = bins.map(() => 0);
	const areas = parts.map((_, part) => {
		const top = base.map((value, bin) => value + heights[bin]![part]!);
		// A single step is drawn as wide as the chart.
		const at = (bin: number) => (bins.length === 1 ? undefined : x(steps, (bins[bin]!.first + bins[bin]!.last) / 2));
		const edge = (values: readonly number[]) =>
			bins.length === 1
				? [`0,${y(scale, values[0]!)}`, `${width},${y(scale, values[0]!)}`]
				: values.map((value, bin) => `${at(bin)},${y(scale, value)}`);
		const points = [...edge(top), ...edge(base).toReversed()].join(" ");
		base = top;
		return `<polygon class="area c${part}" points="${points}"/>`;
	});
	const drawing = `${grid(levels, scale)}${areas.join("")}${marks(options.marks ?? [], steps)}`;
	const keys = parts.map(([name], part) => `<span class="key c${part}">${escapeHtml(name)}</span>`).join("");
	return `<div class="keys">${keys}</div>${frame(drawing, { levels, steps, unit: options.unit, label: options.label })}`;
}

function meanOf(series: Series, bin: number): number {
	const one = series.bins[bin];
	return one ? one.sum / one.count : 0;
}

/** Rows of cells, darker where the value is larger; 1 is half dark. */
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
