/** Charts over steps, of lines or of stacked areas. The values that the pointer shows (hover.ts) are JSON beside the drawing. */
import { type Bin, largestOf, leastOf } from "../series.ts";
import { Html, html, nothing, numberText, place } from "./html.ts";

export interface Mark {
	readonly step: number;
	readonly kind: string;
	readonly sentence: string;
}

export interface Curve {
	readonly name: string;
	readonly bins: readonly Readonly<Bin>[];
	/** Index of a colour of the style. */
	readonly colour: number;
	/** Whether values are rare, so that points are drawn. */
	readonly sparse?: boolean;
}

export interface ChartOptions {
	readonly label: string;
	readonly unit?: string;
	readonly marks?: readonly Mark[];
	/** Whether few values far above all others are clipped, so that they do not determine the height. */
	readonly clips?: boolean;
	/** Whether the axis is logarithmic until the reader switches, where the values allow it. */
	readonly log?: boolean;
}

const middle = ({ first, last }: Readonly<Bin>) => (first + last) / 2;
const mean = ({ sum, count }: Readonly<Bin>) => sum / count;

function marks(events: readonly Mark[], steps: Scale): Html[] {
	return events
		.filter(({ step }) => step >= steps.low && step <= steps.high)
		.map(({ step, kind, sentence }) => {
			const at = x(steps, step);
			return html`<line class="mark ${kind.replaceAll(" ", "-")}" x1="${at}" x2="${at}" y1="0" y2="${height}"><title>step ${step}: ${sentence || kind}</title></line>`;
		});
}

const keysOf = (curves: readonly Pick<Curve, "name" | "colour">[]): Html[] =>
	curves.map(({ name, colour }) => html`<span class="key c${colour}">${name}</span>`);

/** Values for the pointer: the first step of each bin, its mean, and for a bin of several steps the last step and the extremes. */
function pointerData(curves: readonly Curve[], unit: string, steps: Scale, stacked: boolean): Html {
	const short = (value: number) => Number(value.toPrecision(5));
	const data = {
		...{ unit, stacked, low: steps.low, high: steps.high },
		curves: curves.map(({ name, bins, colour }) => ({
			name,
			colour,
			first: bins.map(({ first }) => first),
			mean: bins.map((bin) => short(mean(bin))),
			...(bins.some(({ count }) => count > 1)
				? {
						last: bins.map(({ last }) => last),
						...(stacked
							? {}
							: { least: bins.map(({ least }) => short(least)), most: bins.map(({ most }) => short(most)) }),
					}
				: {}),
		})),
	};
	return Html.data(data);
}

/** The largest value of the axis: with clipping a little above the 98th percentile, if the rest is far above. */
function ceiling(values: readonly number[], clips: boolean): number {
	const most = largestOf(values);
	const usual = values.toSorted((a, b) => a - b)[Math.floor(0.98 * (values.length - 1))]!;
	return clips && usual > 0 && most > 2 * usual ? 1.2 * usual : most;
}

function clippedText(values: readonly number[], bins: readonly Readonly<Bin>[], most: number, unit: string): Html {
	const above = values.flatMap((value, i) => (value > most * (1 + 1e-9) ? [{ value, bin: bins[i]! }] : []));
	if (above.length === 0) return nothing;
	const highest = above.toSorted((a, b) => b.value - a.value)[0]!;
	const others = above.length === 1 ? "" : `, the highest of ${above.length}`;
	return html`<p>Above the drawing: ${numberText(highest.value)}${unit} at step ${numberText(highest.bin.first)}${others}.</p>`;
}

function line({ bins, colour, sparse = false }: Curve, steps: Scale, scale: Scale): Html {
	const at = (bin: Readonly<Bin>) => x(steps, middle(bin));
	const points = bins.map((bin) => `${at(bin)},${y(scale, mean(bin))}`).join(" ");
	const wide = !sparse && bins.some(({ least, most }) => least < most);
	const upper = () => bins.map((bin) => `${at(bin)},${y(scale, bin.most)}`);
	const lower = () => bins.toReversed().map((bin) => `${at(bin)},${y(scale, bin.least)}`);
	const band = wide ? html`<polygon class="band c${colour}" points="${[...upper(), ...lower()].join(" ")}"/>` : nothing;
	// A line of length 0 with round ends is drawn as a dot.
	const alone = sparse || bins.length === 1;
	const dots = alone
		? bins.map((bin) => html`<path class="dot c${colour}" d="M${at(bin)} ${y(scale, mean(bin))}h0"/>`)
		: nothing;
	return html`${band}<polyline class="line c${colour}${sparse ? " sparse" : ""}" points="${points}"/>${dots}`;
}

/**
 * Lines of the bins' means, with bands of their extremes; null without values. The reader may switch between a linear and a
 * logarithmic axis.
 */
export function lineChart(given: readonly Curve[], options: ChartOptions): Html | null {
	const curves = given.filter(({ bins }) => bins.length > 0);
	if (curves.length === 0) return null;
	const { label, unit = "" } = options;
	const steps = stepScale(curves.map(({ bins }) => bins));
	const all = curves.flatMap(({ bins }) => bins);
	const least = leastOf(all.map((bin) => bin.least));
	const values = all.map(({ most }) => most);
	const most = ceiling(values, options.clips ?? false);
	const draw = (levels: readonly number[], kind: string) => {
		const scale = { low: levels[0]!, high: levels.at(-1)!, log: kind === "log" };
		const lines = curves.map((curve) => line(curve, steps, scale));
		const axes = { levels, scale, steps, unit, label, kind };
		return frame(html`${lines}${marks(options.marks ?? [], steps)}`, axes);
	};
	const positive = leastOf(all.map(mean).filter((value) => value > 0));
	const hasLog = leastOf(all.map(mean)) >= 0 && Number.isFinite(positive);
	const box = options.log ? html`<input type="checkbox" checked>` : html`<input type="checkbox">`;
	const toggle = hasLog ? html`<label class="axis">${box} log axis</label>` : nothing;
	const keys = curves.length > 1 ? keysOf(curves) : nothing;
	const above = html`<div class="keys">${keys}${toggle}</div>`;
	const drawings = [
		draw(ticks(least, most), "linear"),
		...(hasLog ? [draw(logTicks(least > 0 ? least : positive, largestOf(values)), "log")] : []),
	];
	const clipped = clippedText(values, all, most, unit);
	return html`<div class="curves">${above}${drawings}${clipped}${pointerData(curves, unit, steps, false)}</div>`;
}

/** Stacked areas of curves with values at the same steps, the first curve at the bottom. */
export function stackedChart(parts: readonly Curve[], options: ChartOptions): Html | null {
	const bins = parts[0]?.bins ?? [];
	if (bins.length === 0) return null;
	const { label, unit = "" } = options;
	const heights = bins.map((_, bin) => parts.map((part) => (part.bins[bin] ? mean(part.bins[bin]) : 0)));
	const totals = heights.map((values) => values.reduce((sum, value) => sum + value, 0));
	const most = ceiling(totals, options.clips ?? false);
	const levels = ticks(0, most);
	const scale = { low: 0, high: levels.at(-1)! };
	const steps = stepScale([bins]);
	let base = bins.map(() => 0);
	const areas = parts.map(({ colour }, part) => {
		const top = base.map((value, bin) => value + heights[bin]![part]!);
		// A single step spans the width of the chart.
		const edge = (values: readonly number[]) =>
			bins.length === 1
				? [`0,${y(scale, values[0]!)}`, `${width},${y(scale, values[0]!)}`]
				: values.map((value, bin) => `${x(steps, middle(bins[bin]!))},${y(scale, value)}`);
		const points = [...edge(top), ...edge(base).toReversed()].join(" ");
		base = top;
		return html`<polygon class="area c${colour}" points="${points}"/>`;
	});
	const axes = { levels, scale, steps, unit, label, kind: "linear" };
	const drawing = frame(html`${areas}${marks(options.marks ?? [], steps)}`, axes);
	const clipped = clippedText(totals, bins, scale.high, unit);
	return html`<div class="curves"><div class="keys">${keysOf(parts)}</div>${drawing}${clipped}${pointerData(parts, unit, steps, true)}</div>`;
}

// Scales and axes of a drawing. The SVG has only shapes, because it stretches with the page; text is HTML, so that
// letters keep their size on a phone.

/** Width and height of a drawing in SVG units. */
export const [width, height] = [1000, 300];

interface Scale {
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
function stepScale(lists: readonly (readonly Readonly<Bin>[])[]): Scale {
	const ends = lists.flatMap((bins) => (bins.length > 0 ? [bins[0]!.first, bins.at(-1)!.last] : []));
	const [low, high] = [leastOf(ends), largestOf(ends)];
	return { low, high: high === low ? low + 1 : high };
}

/** Position of a value between the low end (0) and the high end (1) of a scale. */
function shareOf({ low, high, log = false }: Scale, value: number): number {
	if (!log) return (value - low) / (high - low);
	return Math.log(Math.max(value, low) / low) / Math.log(high / low);
}

export const x = (scale: Scale, step: number) => (shareOf(scale, step) * width).toFixed(1);
export const y = (scale: Scale, value: number) => (height - shareOf(scale, value) * height).toFixed(1);

interface Axes {
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
