/** Sections of a page of several runs: their facts in columns, and the differences of their configurations. */
import { type DrawnRun, runColours } from "./curves.ts";
import { escapeHtml, section } from "./html.ts";
import { factsOf, stateOf } from "./sections.ts";

export function compareHead(runs: readonly DrawnRun[], now: number): string {
	const facts = runs.map(({ log }) => new Map(factsOf(log, now)));
	const names = [...new Set(facts.flatMap((one) => [...one.keys()]))];
	const rows = runs.map(({ name, log }, i) => {
		const { text, kind } = stateOf(log, now);
		const cells = names.map((fact) => `<td class="number">${escapeHtml(facts[i]!.get(fact) ?? "")}</td>`);
		return `<tr><td><span class="key c${runColours[i]}">${escapeHtml(name)}</span></td><td><span class="state ${kind}">${escapeHtml(text)}</span></td>${cells.join("")}</tr>`;
	});
	const titles = names.map((name) => `<th>${name}</th>`).join("");
	return `<header><h1>${runs.length} runs</h1><div class="scroll"><table class="runs"><tr><th>run</th><th></th>${titles}</tr>${rows.join("")}</table></div></header>`;
}

export function differencesSection(runs: readonly DrawnRun[]): string {
	const configurations = runs.map(({ log }) => (log.start?.configuration ?? {}) as Readonly<Record<string, unknown>>);
	const keys = [...new Set(configurations.flatMap((one) => Object.keys(one)))];
	const textOf = (value: unknown) => (value === undefined || value === null ? "" : String(value));
	const rows = keys.flatMap((key) => {
		const values = configurations.map((one) => textOf(one[key]));
		if (values.every((value) => value === values[0])) return [];
		return [`<tr><td>${escapeHtml(key)}</td>${values.map((value) => `<td>${escapeHtml(value)}</td>`).join("")}</tr>`];
	});
	if (keys.length === 0) return "";
	const titles = runs.map(({ name }, i) => `<th><span class="key c${runColours[i]}">${escapeHtml(name)}</span></th>`);
	const table = `<div class="scroll"><table><tr><th>key</th>${titles.join("")}</tr>${rows.join("")}</table></div>`;
	const none = "<p>The configurations are equal.</p>";
	return section("Configuration: what differs", rows.length === 0 ? none : table, true);
}
