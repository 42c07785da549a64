/** One run as one HTML page without any other file. */
import type { RunLog } from "../run-log.ts";
import { escapeHtml } from "./html.ts";
import {
	configurationSection,
	evaluationSection,
	eventSection,
	expertSection,
	head,
	lossSection,
	memorySection,
	normSection,
	timeSection,
	topologySection,
} from "./sections.ts";
import { style } from "./style.ts";

/** Events that are drawn into charts. */
const marked = 60;

/** `now`: milliseconds since 1970, to tell a run that is silent. */
export function reportPage(log: RunLog, now: number): string {
	const marks = log.events.filter(({ kind }) => kind !== "end").slice(-marked);
	const column = (sections: readonly string[]) => `<div class="column">${sections.join("\n")}</div>`;
	const sections = [
		head(log, now),
		column([lossSection(log, marks), timeSection(log, marks)]),
		column([normSection(log, marks), expertSection(log), memorySection(log), evaluationSection(log)]),
		eventSection(log),
		topologySection(log),
		configurationSection(log),
	];
	return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escapeHtml(log.file)}</title><style>${style}</style></head>
<body><main>${sections.filter((one) => one !== "").join("\n")}</main></body></html>
`;
}
