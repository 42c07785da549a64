/** Sections of a page of several runs: their facts in columns, and the differences of their configurations. */
import { type DrawnRun, runColours } from "./curves.ts";
import { type Html, html, nothing, section } from "./html.ts";
import { factsOf, stateOf } from "./sections.ts";

export function compareHead(runs: readonly DrawnRun[], now: number): Html {
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

export function differencesSection(runs: readonly DrawnRun[]): Html {
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
