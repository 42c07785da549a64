/**
 * Scales and axes of a drawing. The SVG has only shapes, because it stretches with the page; text is HTML, so that letters keep
 * their size on a phone.
 */

import type { Bin } from "../series.ts";
import { largestOf, leastOf } from "../statistics.ts";
import { type Html, html, numberText, place } from "./html.ts";

/** Width and height of a drawing in SVG units. */
export const [width, height] = [1000, 300];

export interface Scale {
	readonly low: number;
	readonly high: number;
	/** Whether the scale is logarithmic. */
	readonly log?: boolean;
}

/** Ticks: round numbers that span [low, high]. */
export function ticks(low: number, high: number, count = 4): number[] {
	const span = high - low || Math.abs(high) || 1;
	const rough = span / count;
	const power = 10 ** Math.floor(Math.log10(rough));
	const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough)!;
	const first = Math.floor(low / step + 1e-9);
	const last = Math.ceil(high / step - 1e-9);
	return Array.from({ length: Math.max(1, last - first) + 1 }, (_, i) => (first + i) * step);
}

/** Ticks of a logarithmic axis that span [low, high]: powers of ten, and multiples of them where few fit. */
export function logTicks(low: number, high: number, count = 5): number[] {
	const decades = Math.log10(high / low);
	const even = ticks(low, high, count);
	if (decades < 0.5 && even[0]! > 0) return even;
	const factors = decades > count ? [1] : decades > 1.5 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
	const first = Math.floor(Math.log10(low));
	const last = Math.ceil(Math.log10(high));
	const all = Array.from({ length: last - first + 1 }, (_, i) => factors.map((factor) => factor * 10 ** (first + i)));
	const sorted = all.flat();
	const begin = Math.max(
		0,
		sorted.findLastIndex((one) => one <= low * (1 + 1e-9)),
	);
	const end = sorted.findIndex((one) => one >= high * (1 - 1e-9));
	const inside = sorted.slice(begin, end < 0 ? undefined : Math.max(end, begin + 1) + 1);
	const every = Math.ceil((inside.length - 1) / (2 * count));
	// The last tick is the end of the axis.
	return inside.filter((_, i) => i % every === 0 || i === inside.length - 1);
}

/** Scale of the steps of bins, of at least two steps. */
export function stepScale(lists: readonly (readonly Readonly<Bin>[])[]): Scale {
	const ends = lists.flatMap((bins) => (bins.length > 0 ? [bins[0]!.first, bins.at(-1)!.last] : []));
	const [low, high] = [leastOf(ends), largestOf(ends)];
	return { low, high: high === low ? low + 1 : high };
}

/** Position of a value between the low end (0) and the high end (1) of a scale. */
export function shareOf({ low, high, log = false }: Scale, value: number): number {
	if (!log) return (value - low) / (high - low);
	return Math.log(Math.max(value, low) / low) / Math.log(high / low);
}

export const x = (scale: Scale, step: number) => (shareOf(scale, step) * width).toFixed(1);
export const y = (scale: Scale, value: number) => (height - shareOf(scale, value) * height).toFixed(1);

export interface Axes {
	readonly levels: readonly number[];
	readonly scale: Scale;
	readonly steps: Scale;
	readonly unit: string;
	readonly label: string;
	/** CSS class of the element: "linear" or "log". */
	readonly kind: string;
}

/** The shortest text of a round number. */
function levelText(level: number): string {
	const round = Number(level.toPrecision(4));
	return round !== 0 && Math.abs(round) < 1e-3 ? round.toExponential() : numberText(round);
}

/** A drawing with grid and axes. */
export function frame(drawing: Html, { levels, scale, steps, unit, label, kind }: Axes): Html {
	const grid = levels.map(
		(level) => html`<line class="grid" x1="0" x2="${width}" y1="${y(scale, level)}" y2="${y(scale, level)}"/>`,
	);
	const names = levels.map(
		(level) => html`<span class="${place(1 - shareOf(scale, level))}">${levelText(level)}${unit}</span>`,
	);
	const places = ticks(steps.low, steps.high, 5)
		.filter((step) => step >= steps.low && step <= steps.high && Number.isInteger(step))
		.map((step) => html`<span class="${place(shareOf(steps, step))}">${numberText(step)}</span>`);
	const picture = html`<svg viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" role="img" aria-label="${label}">${grid}${drawing}</svg>`;
	return html`<div class="chart ${kind}"><div class="levels">${names}</div><div class="plot" data-low="${scale.low}" data-high="${scale.high}">${picture}</div><div class="steps">${places}</div></div>`;
}
