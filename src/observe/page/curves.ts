/** Sections with the curves of one run, or of several runs in the same charts; nothing without values. */
import { counted } from "../../system/counted.ts";
import type { RunLog, Streak } from "../run-log/reader.ts";
import type { Series } from "../series.ts";
import { type ChartOptions, type Curve, lineChart, type Mark, stackedChart } from "./charts.ts";
import { type Html, html, millisecondsText, nothing, numberText, section } from "./html.ts";

export interface DrawnRun {
	/** Name of the run, unique on the page. */
	readonly name: string;
	readonly log: RunLog;
}

/** Colours of runs, in their order on the command line. */
export const runColours = [0, 1, 2, 3, 5, 6, 4];
/** Colour of validation losses in a chart of training losses. */
const validationColour = 5;

/** A curve for each run, in the run's colour, or in `colour` for a single run. */
function curvesOf(
	runs: readonly DrawnRun[],
	pick: (log: RunLog) => Series | undefined,
	{ name, colour }: { readonly name: string; readonly colour: number },
): Curve[] {
	return runs.flatMap((run, i) => {
		const bins = pick(run.log)?.bins ?? [];
		if (bins.length === 0) return [];
		return [runs.length === 1 ? { name, bins, colour } : { name: run.name, bins, colour: runColours[i]! }];
	});
}

/** Names of all runs, in the order of their first occurrence. */
const namesOf = (runs: readonly DrawnRun[], names: (log: RunLog) => Iterable<string>): string[] => [
	...new Set(runs.flatMap(({ log }) => [...names(log)])),
];

/** Charts below each other, with their names if there are several. */
function charts(
	list: readonly (readonly [name: string, curves: readonly Curve[]])[],
	options: Omit<ChartOptions, "label">,
): Html {
	const drawn = list.flatMap(([name, curves]) => {
		const chart = lineChart(curves, { ...options, label: name });
		return chart === null ? [] : [[name, chart] as const];
	});
	return html`${drawn.map(([name, chart]) => html`${drawn.length > 1 ? html`<h3>${name}</h3>` : nothing}${chart}`)}`;
}

export function lossSection(runs: readonly DrawnRun[], marks: readonly Mark[]): Html {
	const trained = namesOf(runs, ({ values }) =>
		[...values.keys()].filter((name) => / loss$|_loss$|^lm loss/.test(name)),
	);
	const names = [...new Set([...trained, ...namesOf(runs, ({ validation }) => validation.keys())])];
	const list = names.map((name, i) => {
		const training = curvesOf(runs, (log) => log.values.get(name), { name: "training", colour: i === 0 ? 0 : 3 });
		const evaluated = runs.flatMap((run, at): Curve[] => {
			const bins = run.log.validation.get(name)?.bins ?? [];
			if (bins.length === 0) return [];
			const alone = runs.length === 1;
			const colour = alone ? validationColour : runColours[at]!;
			return [{ name: alone ? "validation" : `${run.name}, validation`, bins, colour, sparse: true }];
		});
		return [name, [...training, ...evaluated]] as const;
	});
	return section("Loss", charts(list, { marks, log: true }));
}

export function normSection(runs: readonly DrawnRun[], marks: readonly Mark[]): Html {
	const names = namesOf(runs, ({ values }) => {
		const first = values.get("grad_norm");
		// Under the exact policy the exact norm equals the norm.
		const repeats = (series: Series) =>
			first !== undefined && series !== first && Math.abs(meanOf(series) / meanOf(first) - 1) < 1e-6;
		return [...values].filter(([name, series]) => /norm/.test(name) && !repeats(series)).map(([name]) => name);
	});
	const list = names.map((name) => [name, curvesOf(runs, (log) => log.values.get(name), { name, colour: 1 })] as const);
	return section("Gradient norm", charts(list, { marks }));
}

export function learningRateSection(runs: readonly DrawnRun[]): Html {
	const curves = curvesOf(runs, (log) => log.learningRate, { name: "learning rate", colour: 2 });
	return section("Learning rate", charts([["learning rate", curves]], {}));
}

export function throughputSection(runs: readonly DrawnRun[]): Html {
	const tokens = curvesOf(runs, (log) => log.tokensPerSecond, { name: "tokens/s", colour: 6 });
	const alone = runs.length === 1 ? [...runs[0]!.log.modules.values()] : [];
	const rates = alone.map(({ name, rate }, i): Curve => ({ name, bins: rate.bins, colour: runColours[i]! }));
	const list = [["tokens/s", tokens] as const, ["TFLOP/s a rank", rates] as const];
	return section("Throughput", charts(list, { clips: true }));
}

/** The section with the step times of several runs. */
export function stepTimeSection(runs: readonly DrawnRun[]): Html {
	const curves = curvesOf(runs, (log) => log.stepMilliseconds, { name: "step time", colour: 2 });
	return section("Step time", charts([["step time", curves]], { unit: " ms", clips: true }));
}

/** The section of one run with the parts of a step, for each module. */
export function timeSection(run: DrawnRun, marks: readonly Mark[]): Html {
	const modules = [...run.log.modules.values()];
	if (modules.length === 0) return stepTimeSection([run]);
	const drawn = modules.map((module) => {
		const parts = [...module.parts].map(([name, { bins }], colour): Curve => ({ name, bins, colour }));
		const about = { label: `step time of ${module.name}`, unit: " ms", marks, clips: true };
		const slowest = [...module.slowest].toSorted((a, b) => b[1] - a[1])[0];
		const share = slowest
			? (100 * slowest[1]) / [...module.slowest.values()].reduce((sum, count) => sum + count, 0)
			: 0;
		const who =
			slowest && module.ranks > 1
				? html`<p>Rank ${slowest[0]} was the slowest in ${share.toFixed(0)} % of the steps.${streakText(module.streak)}</p>`
				: nothing;
		const rate = recentOf(module.rate);
		const speed = rate > 0 ? `, ${numberText(rate)} TFLOP/s a rank` : "";
		return html`<h3>${module.name}: ${counted(module.ranks, "rank")}${speed}</h3>${stackedChart(parts, about) ?? nothing}${who}`;
	});
	return section("Where a step's time goes", html`${drawn}`);
}

/** Least number of consecutive steps that a sentence reports. */
const notableStreak = 8;

function streakText(streak: Streak | null): string {
	if (streak === null || streak.last - streak.first + 1 < notableStreak) return "";
	const { rank, first, last, busy, mean } = streak;
	return ` Rank ${rank} was the slowest in every step from ${first} to ${last}: in the first of them it worked ${millisecondsText(busy)}, its module's ranks ${millisecondsText(mean)} on average.`;
}

type Bins = Series["bins"];

const of = (bins: Bins): number =>
	bins.reduce((sum, bin) => sum + bin.sum, 0) / bins.reduce((sum, bin) => sum + bin.count, 0);

/** Mean of a series; NaN without values. */
export const meanOf = ({ bins }: Series): number => of(bins);

/** Mean of the last bins, the current value of a curve. */
export const recentOf = (series: Series | undefined): number => of(series?.bins.slice(-8) ?? []);
