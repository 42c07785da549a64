/** One run, or several compared, as one HTML page without any other file. */
import { UserError } from "../../system/errors.ts";
import type { RunLog } from "../run-log/reader.ts";
import { compareHead, differencesSection } from "./compare.ts";
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
import { escapeHtml } from "./html.ts";
import {
	configurationSection,
	evaluationSection,
	eventSection,
	expertSection,
	head,
	memorySection,
	topologySection,
} from "./sections.ts";
import { style } from "./style.ts";

/** Events that are drawn into charts. */
const marked = 60;

/** `now`: milliseconds since 1970, to tell a run that is silent. */
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
		eventSection(log),
		topologySection(log),
		configurationSection(log),
	]);
}

/** Curves of several runs over each other, and in what their configurations differ. */
export function comparisonPage(logs: readonly RunLog[], now: number): string {
	if (logs.length > runColours.length) {
		throw new UserError(`At most ${runColours.length} runs can be compared; these are ${logs.length}.`);
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

/** Paths without the folders that all of them begin and the names that all of them end with. */
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
	// A file that is given twice gets its place in the list behind its name.
	return names.map((name, i) => (names.indexOf(name) === i ? name : `${name} (${i + 1})`));
}

const column = (sections: readonly string[]) => `<div class="column">${sections.join("\n")}</div>`;

function page(title: string, sections: readonly string[]): string {
	return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escapeHtml(title)}</title><style>${style}</style></head>
<body><main>${sections.filter((one) => one !== "").join("\n")}</main><script>${hoverScript}</script></body></html>
`;
}
