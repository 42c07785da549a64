/** `mimo report`: draws one run's log, or compares several, as an HTML page. */
import { writeFileSync } from "node:fs";
import { basename, extname } from "node:path";
import { defineCommand } from "citty";
import { note } from "../observe/messages.ts";
import { comparisonPage, reportPage } from "../observe/page/page.ts";
import { type RunLog, readRunLog } from "../observe/run-log/reader.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { systemReason } from "../system/system-errors.ts";

export default defineCommand({
	meta: {
		name: "report",
		description: "Draw a run's log, finished or not, as one HTML page; or compare several.",
	},
	args: {
		run: {
			type: "positional",
			description: "A JSON log (log-json), or a folder with one; several are compared.",
			valueHint: "RUN…",
			required: true,
		},
		"all-runs": { type: "boolean", description: "Draw all runs of a log as one; default: the latest run." },
		output: { type: "string", description: "Page to write; default: the logs' names with .html, in this folder." },
	},
	run: ({ args }) => {
		const logs = args._.map((path) => readRunLog(path, { allRuns: args["all-runs"] ?? false }));
		const [first] = logs;
		const names = [...new Set(logs.map(({ file }) => basename(file, extname(file))))];
		const page = args.output ?? `${names.join("-")}.html`;
		const text = logs.length === 1 ? reportPage(first!, Date.now()) : comparisonPage(logs, Date.now());
		try {
			writeFileSync(page, text);
		} catch (error) {
			throw new UserError(`The page ${page} cannot be written: ${systemReason(error)}.`);
		}
		const steps = logs.map((log) => counted(log.steps, "step")).join(" and ");
		note(`${page}: ${steps}, ${(text.length / 1024).toFixed(0)} KiB.`);
		for (const log of logs) noteEarlier(log);
	},
});

function noteEarlier({ earlierRuns, file }: RunLog): void {
	if (earlierRuns === 0) return;
	const runs = earlierRuns === 1 ? "An earlier run" : `${earlierRuns} earlier runs`;
	note(`${runs} of ${file} ${earlierRuns === 1 ? "is" : "are"} left out; --all-runs draws all as one.`);
}
