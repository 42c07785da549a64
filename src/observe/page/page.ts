/** The report of a run, or the comparison of several runs, as a self-contained HTML page. */
import { UserError } from "../../system/errors.ts";
import type { RunLog } from "../run-log/reader.ts";
import {
	type DrawnRun,
	learningRateSection,
	lossSection,
	normSection,
	runColours,
	stepTimeSection,
	throughputSection,
	timeSection,
} from "./curves.ts";
import { familySection } from "./family.ts";
import { hoverScript } from "./hover.ts";
import { type Html, html, htmlPage, nothing, section } from "./html.ts";
import {
	configurationSection,
	evaluationSection,
	eventSection,
	expertSection,
	factsOf,
	head,
	memorySection,
	sampleSection,
	stateOf,
	topologySection,
} from "./sections.ts";
import { style } from "./style.ts";

/** Most events that charts mark. */
const marked = 60;

/** The report of a run. `now`: milliseconds since 1970, from which the page knows whether the run is silent. */
export function reportPage(log: RunLog, now: number): string {
	const marks = log.events.filter(({ kind }) => kind !== "end").slice(-marked);
	const run: DrawnRun = { name: log.file, log };
	return page(log.file, [
		head(log, now),
		column([lossSection([run], marks), learningRateSection([run]), timeSection(run, marks)]),
		column([
			normSection([run], marks),
			throughputSection([run]),
			familySection(log),
			expertSection(log),
			memorySection(log),
			evaluationSection(log),
		]),
		sampleSection(log),
		eventSection(log),
		topologySection(log),
		configurationSection(log),
	]);
}

/** The comparison of several runs: curves in the same charts, and differences of their configurations. */
export function comparisonPage(logs: readonly RunLog[], now: number): string {
	if (logs.length > runColours.length) {
		throw new UserError(`At most ${runColours.length} runs can be compared, and ${logs.length} are given.`);
	}
	const names = distinctNames(logs.map(({ file }) => file));
	const runs = logs.map((log, i): DrawnRun => ({ name: names[i]!, log }));
	return page(names.join(", "), [
		compareHead(runs, now),
		column([lossSection(runs, []), learningRateSection(runs)]),
		column([normSection(runs, []), throughputSection(runs), stepTimeSection(runs)]),
		differencesSection(runs),
	]);
}

/** Paths without their common first folders and common last names. */
export function distinctNames(files: readonly string[]): string[] {
	const parts = files.map((file) => file.split("/"));
	const shared = (part: (list: readonly string[], i: number) => string | undefined) => {
		const shortest = Math.min(...parts.map(({ length }) => length));
		let count = 0;
		while (count < shortest - 1 && parts.every((list) => part(list, count) === part(parts[0]!, count))) count++;
		return count;
	};
	const first = shared((list, i) => list[i]);
	const last = Math.min(
		shared((list, i) => list.at(-1 - i)),
		...parts.map(({ length }) => length - first - 1),
	);
	const names = parts.map((list) => list.slice(first, list.length - last).join("/"));
	// A path that occurs twice gets its position in the list as a suffix.
	return names.map((name, i) => (names.indexOf(name) === i ? name : `${name} (${i + 1})`));
}

const column = (sections: readonly Html[]) => html`<div class="column">${sections}</div>`;

function page(title: string, sections: readonly Html[]): string {
	return htmlPage(title, { style, script: hoverScript, body: html`<main>${sections}</main>` });
}

// Sections of a page of several runs: their facts in columns, and the differences of their configurations.

function compareHead(runs: readonly DrawnRun[], now: number): Html {
	const facts = runs.map(({ log }) => new Map(factsOf(log, now)));
	const names = [...new Set(facts.flatMap((one) => [...one.keys()]))];
	const rows = runs.map(({ name, log }, i) => {
		const { text, kind } = stateOf(log, now);
		const cells = names.map((fact) => html`<td class="number">${facts[i]!.get(fact) ?? ""}</td>`);
		return html`<tr><td><span class="key c${runColours[i]!}">${name}</span></td><td><span class="state ${kind}">${text}</span></td>${cells}</tr>`;
	});
	const titles = names.map((name) => html`<th>${name}</th>`);
	return html`<header><h1>${runs.length} runs</h1><div class="scroll"><table class="runs"><tr><th>run</th><th></th>${titles}</tr>${rows}</table></div></header>`;
}

function differencesSection(runs: readonly DrawnRun[]): Html {
	const configurations = runs.map(({ log }) => (log.start?.configuration ?? {}) as Readonly<Record<string, unknown>>);
	const keys = [...new Set(configurations.flatMap((one) => Object.keys(one)))];
	const textOf = (value: unknown) => (value === undefined || value === null ? "" : String(value));
	const rows = keys.flatMap((key) => {
		const values = configurations.map((one) => textOf(one[key]));
		if (values.every((value) => value === values[0])) return [];
		return [html`<tr><td>${key}</td>${values.map((value) => html`<td>${value}</td>`)}</tr>`];
	});
	if (keys.length === 0) return nothing;
	const titles = runs.map(({ name }, i) => html`<th><span class="key c${runColours[i]!}">${name}</span></th>`);
	const table = html`<div class="scroll"><table><tr><th>key</th>${titles}</tr>${rows}</table></div>`;
	const none = html`<p>The configurations are equal.</p>`;
	return section("Configuration: what differs", rows.length === 0 ? none : table, { wide: true });
}
