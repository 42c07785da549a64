/** Sections of a run's page; each is nothing without entries in the log. */
import { counted } from "../../system/counted.ts";
import { bytesText } from "../output.ts";
import type { LoggedBudget } from "../run-log/family.ts";
import type { RunLog } from "../run-log/reader.ts";
import type { SampleRecord } from "../run-log/writer.ts";
import { largestOf, leastOf } from "../series.ts";
import { type Curve, frame, lineChart, ticks, x, y } from "./charts.ts";
import { meanOf, recentOf, runColours } from "./curves.ts";
import { durationText, type Html, html, millisecondsText, nothing, numberText, place, section } from "./html.ts";

type Entry = Readonly<Record<string, unknown>>;

/** Seconds without growth of the log after which a run may be stuck. */
const quietSeconds = 120;
/** Most cells of the map of experts. */
const mostCells = 2 ** 16;
/** Most ranks that are drawn with their numbers, and most bars of memory. */
const numbered = 64;

const numberOf = (value: unknown): number => (typeof value === "number" ? value : Number.NaN);

/** Planned number of steps. */
function plannedSteps(log: RunLog): number {
	return numberOf(log.start?.train_iterations);
}

export function stateOf(log: RunLog, now: number): { readonly text: string; readonly kind: "" | "bad" | "quiet" } {
	const last = log.events.at(-1);
	if (last?.kind === "failure") return { text: `failed after step ${last.step}: ${last.sentence}`, kind: "bad" };
	if (last?.kind === "stop") return { text: `stopped after step ${last.step}: ${last.sentence}`, kind: "quiet" };
	if (last?.kind === "end" || log.lastStep === plannedSteps(log)) return { text: "finished", kind: "" };
	const silent = log.lastTime === null ? 0 : (now - Date.parse(log.lastTime)) / 1000;
	const usual = meanOf(log.stepMilliseconds) / 1000;
	if (silent > Math.max(quietSeconds, 10 * usual)) {
		return { text: `no step for ${durationText(silent)}: stuck, or ended without a message`, kind: "quiet" };
	}
	return { text: "running", kind: "" };
}

/** Facts about a run and its state. */
export function factsOf(log: RunLog, now: number): readonly (readonly [name: string, value: string])[] {
	const state = stateOf(log, now);
	const planned = plannedSteps(log);
	const milliseconds = recentOf(log.stepMilliseconds);
	const facts: (readonly [string, string])[] = [
		[
			"step",
			Number.isFinite(planned) ? `${numberText(log.lastStep)} of ${numberText(planned)}` : numberText(log.lastStep),
		],
	];
	const latest = log.last?.["lm loss"];
	if (typeof latest === "number") facts.push(["lm loss", numberText(latest)]);
	const validation = log.validation.get("lm loss")?.bins.at(-1);
	if (validation) facts.push(["validation", numberText(validation.sum / validation.count)]);
	if (Number.isFinite(milliseconds)) facts.push(["a step takes", millisecondsText(milliseconds)]);
	const rate = recentOf(log.tokensPerSecond);
	if (Number.isFinite(rate)) facts.push(["tokens/s", numberText(Math.round(rate))]);
	if (log.firstTime && log.lastTime) {
		facts.push(["since the start", durationText((Date.parse(log.lastTime) - Date.parse(log.firstTime)) / 1000)]);
	}
	if (planned > log.lastStep && state.text === "running") {
		facts.push(["left", durationText(((planned - log.lastStep) * milliseconds) / 1000)]);
	}
	return facts;
}

export function head(log: RunLog, now: number): Html {
	const state = stateOf(log, now);
	const facts = factsOf(log, now);
	const list = facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`);
	return html`<header><h1>${log.file}</h1><span class="state ${state.kind}">${state.text}</span><dl class="facts">${list}</dl></header>`;
}

export function expertSection(log: RunLog): Html {
	if (log.experts.size === 0) return nothing;
	const rows = [...log.experts]
		.toSorted(([a], [b]) => a - b)
		.map(([layer, counts]) => {
			const mean = counts.reduce((sum, count) => sum + count, 0) / counts.length || 1;
			return { name: `layer ${layer}`, values: counts.map((count) => count / mean) };
		});
	const worst = rows
		.flatMap(({ name, values }) => values.map((value, expert) => ({ name, expert, value })))
		.toSorted((a, b) => b.value - a.value)[0]!;
	const sentence = html`<p>Tokens of every expert over the mean of its layer, whole run, experts from left to right. The busiest is expert ${worst.expert} of ${worst.name} with ${worst.value.toFixed(2)} times the mean.</p>`;
	const over = [...log.imbalance].toSorted(([, a], [, b]) => recentOf(b) - recentOf(a))[0];
	const name = "busiest expert over the mean";
	const chart = over && lineChart([{ name, bins: over[1].bins, colour: 3 }], { label: name });
	const title = over ? html`<h3>Busiest expert over the mean by step, layer ${over[0]}</h3>` : nothing;
	const drawn = mostUneven(rows);
	const left =
		drawn.length < rows.length ? html`<p>The most uneven ${drawn.length} of ${rows.length} layers.</p>` : nothing;
	return section(
		"Load of the experts",
		html`${sentence}${left}${heatMap(drawn)}${chart ? html`${title}${chart}` : nothing}`,
	);
}

/** The rows with the largest values of which the map has room, in their order. */
function mostUneven<Row extends { readonly values: readonly number[] }>(rows: readonly Row[]): readonly Row[] {
	const kept = new Set<Row>();
	let room = mostCells;
	for (const row of rows.toSorted((a, b) => largestOf(b.values) - largestOf(a.values))) {
		room -= row.values.length;
		if (room < 0) break;
		kept.add(row);
	}
	return rows.filter((row) => kept.has(row));
}

export function memorySection(log: RunLog): Html {
	const rows = log.memory.map(({ allocated, peak }, rank) => ({
		name: `rank ${rank}`,
		value: peak,
		inner: allocated,
		text: bytesText(peak),
	}));
	if (rows.length === 0) return nothing;
	const shown = rows.length > numbered ? rows.toSorted((a, b) => b.value - a.value).slice(0, 16) : rows;
	const rest = rows.length > shown.length ? html`<p>The fullest ${shown.length} of ${rows.length} ranks.</p>` : nothing;
	return section("Device memory by rank", html`<p>Between steps (dark) and at the peak.</p>${rest}${bars(shown)}`);
}

export function eventSection(log: RunLog): Html {
	const rows = log.events.map(
		({ step, lastStep, times, kind, sentence, time }) =>
			html`<tr><td class="number">${numberText(step)}${lastStep === step ? "" : `–${numberText(lastStep)}`}</td><td class="number">${kind}</td><td>${times === 1 ? "" : `${numberText(times)} times, the latest: `}${sentence}</td><td class="number">${time?.slice(0, 19).replace("T", " ") ?? ""}</td></tr>`,
	);
	const notes = [
		...(log.eventsLeftOut > 0 ? [`Left out: ${counted(log.eventsLeftOut, "more event")}.`] : []),
		...(log.damaged > 0 ? [`Left out: ${counted(log.damaged, "damaged line")} of the log.`] : []),
	];
	if (rows.length + notes.length === 0) return nothing;
	const table = html`<div class="scroll"><table class="events"><tr><th>step</th><th>what</th><th class="rest"></th><th>when</th></tr>${rows}</table></div>`;
	const content = html`${rows.length > 0 ? table : nothing}${notes.map((one) => html`<p>${one}</p>`)}`;
	return section("Events", content, { wide: true });
}

export function evaluationSection(log: RunLog): Html {
	const rows = log.evaluations.map(({ step, split, losses }) => {
		const values = Object.entries(losses).map(([name, value]) => `${name} ${numberText(value)}`);
		return html`<tr><td class="number">${numberText(step)}</td><td class="number">${split}</td><td>${values.join(", ")}</td></tr>`;
	});
	if (rows.length === 0) return nothing;
	return section(
		"Evaluations",
		html`<div class="scroll"><table><tr><th>step</th><th>split</th><th class="rest"></th></tr>${rows}</table></div>`,
	);
}

/** The topology: modules side by side, with a box for each lane and a square for each rank. */
export function topologySection(log: RunLog): Html {
	const modules = log.topology?.modules ?? [];
	if (modules.length === 0) return nothing;
	const drawn = modules.map(({ name, size, sizes, lanes }) => {
		const many = size > numbered ? " many" : "";
		const kind = name === "language" ? " language" : "";
		const square = (rank: number) =>
			html`<span class="rank${kind}" title="rank ${rank}">${many === "" ? rank : ""}</span>`;
		const boxes = lanes.map((ranks) => html`<span class="lane">${ranks.map(square)}</span>`);
		const shape = Object.entries(sizes ?? {})
			.filter(([, count]) => count > 1)
			.map(([dimension, count]) => `${dimension} ${count}`);
		const about = shape.length > 0 ? ` (${shape.join(", ")})` : "";
		return html`<div class="module"><b>${name}</b> ${counted(size, "rank")}${about}<div class="lanes${many}">${boxes}</div></div>`;
	});
	const edge = html`<div class="arrows">image rows →<br>← gradients</div>`;
	const alone = drawn.length === 1 ? " alone" : "";
	const joined = drawn.map((module, i) => (i === 0 ? module : html`${edge}${module}`));
	return section("Topology", html`<div class="modules${alone}">${joined}</div>`, { wide: true });
}

export function configurationSection(log: RunLog): Html {
	const configuration = log.start?.configuration as Entry | undefined;
	if (typeof configuration !== "object" || configuration === null) return nothing;
	const rows = Object.entries(configuration)
		.filter(([, value]) => value !== null)
		.map(([key, value]) => html`<tr><td>${key}</td><td>${String(value)}</td></tr>`);
	const table = html`<div class="scroll"><table>${rows}</table></div>`;
	return section(
		"Configuration",
		html`<details><summary>${counted(rows.length, "key")} with values</summary>${table}</details>`,
		{ wide: true },
	);
}

/** A heat map with a row of cells for each name; larger values are darker, and 1 is half dark. */
function heatMap(rows: readonly { readonly name: string; readonly values: readonly number[] }[]): Html {
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
function bars(
	rows: readonly { readonly name: string; readonly value: number; readonly text: string; readonly inner?: number }[],
): Html {
	const most = Math.max(largestOf(rows.map(({ value }) => value)), 1);
	return html`${rows.map(({ name, value, text, inner }) => {
		const within = inner === undefined ? nothing : html`<div class="inner ${place(inner / most)}"></div>`;
		return html`<div class="bar"><span>${name}</span><div class="track"><div class="${place(value / most)}"></div>${within}</div><span>${text}</span></div>`;
	})}`;
}

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

// The submodels of an elastic run: the loss by size for every budget, and the router's choices over steps.

export function familySection({ family }: RunLog): Html {
	const budgets = [...family.values()].toSorted((a, b) => b.budget - a.budget);
	if (budgets.length === 0) return nothing;
	const axes = [...new Set(budgets.flatMap(({ sizes }) => [...sizes.keys()]))];
	const curvesOf = (pick: (one: LoggedBudget) => Curve["bins"] | undefined) =>
		budgets.map(
			(one, i): Curve => ({
				name: `budget ${one.budget}`,
				bins: pick(one) ?? [],
				colour: runColours[i % runColours.length]!,
				sparse: true,
			}),
		);
	const chart = (title: string, curves: readonly Curve[], { log = false } = {}) => {
		const drawn = lineChart(curves, { label: title, log });
		return drawn === null ? nothing : html`<h3>${title}</h3>${drawn}`;
	};
	// An axis of equal sizes is not drawn.
	const chosen = axes.filter((axis) => {
		const values = budgets.flatMap(({ sizes }) =>
			(sizes.get(axis)?.bins ?? []).flatMap(({ least, most }) => [least, most]),
		);
		return new Set(values).size > 1;
	});
	const choices = chosen.map((axis) =>
		chart(
			`${axis} by step`,
			curvesOf(({ sizes }) => sizes.get(axis)?.bins),
		),
	);
	const losses = chart(
		"loss of every budget by step",
		curvesOf(({ loss }) => loss.bins),
		{ log: true },
	);
	return section("Family of submodels", html`${table(budgets, axes)}${pareto(budgets)}${losses}${choices}`);
}

const latest = (one: LoggedBudget["loss"] | undefined): number => {
	const bin = one?.bins.at(-1);
	return bin === undefined ? Number.NaN : bin.sum / bin.count;
};

function table(budgets: readonly LoggedBudget[], axes: readonly string[]): Html {
	const heads = ["budget", "parameters", "active", "loss", ...axes];
	const rows = budgets.map((one) => {
		const cells = [
			one.budget,
			one.total,
			one.active,
			latest(one.loss),
			...axes.map((axis) => latest(one.sizes.get(axis))),
		];
		return html`<tr>${cells.map((cell) => html`<td class="number">${Number.isFinite(cell) ? numberText(cell) : ""}</td>`)}</tr>`;
	});
	const head = heads.map((name) => html`<th>${name}</th>`);
	return html`<div class="scroll"><table><tr>${head}</tr>${rows}</table></div>`;
}

/** The latest loss of every budget over its active parameters. */
function pareto(budgets: readonly LoggedBudget[]): Html {
	const points = budgets.flatMap((one, i) => {
		const loss = latest(one.loss);
		return Number.isFinite(loss) ? [{ ...one, loss, colour: runColours[i % runColours.length]! }] : [];
	});
	if (points.length === 0) return nothing;
	const actives = points.map(({ active }) => active);
	const losses = points.map(({ loss }) => loss);
	const across = ticks(0, largestOf(actives));
	const steps = { low: 0, high: across.at(-1)! };
	const levels = ticks(leastOf(losses), largestOf(losses));
	const scale = { low: levels[0]!, high: levels.at(-1)! };
	const place = ({ active, loss }: { active: number; loss: number }) => `${x(steps, active)} ${y(scale, loss)}`;
	const line = points
		.toSorted((a, b) => a.active - b.active)
		.map((point) => place(point).replace(" ", ","))
		.join(" ");
	const dots = points.map(
		(point) =>
			html`<path class="dot c${point.colour}" d="M${place(point)}h0"><title>budget ${point.budget}: ${numberText(point.active)} active parameters, loss ${numberText(point.loss)}</title></path>`,
	);
	const keys = points.map(({ budget, colour }) => html`<span class="key c${colour}">budget ${budget}</span>`);
	const label = "loss by active parameters";
	const drawing = frame(html`<polyline class="line c4 sparse" points="${line}"/>${dots}`, {
		...{ levels, scale, steps, unit: "", label, kind: "linear" },
	});
	return html`<h3>Loss by active parameters</h3><div class="curves"><div class="keys">${keys}</div>${drawing}</div>`;
}
