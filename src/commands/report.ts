/** `mimo report`: a run's log in, one HTML page out. */
import { writeFileSync } from "node:fs";
import { basename, extname } from "node:path";
import { defineCommand } from "citty";
import { UserError } from "../native/errors.ts";
import { exitCodes } from "../native/exit-codes.ts";
import { note } from "../observe/messages.ts";
import { reportPage } from "../observe/page/page.ts";
import { readRunLog } from "../observe/run-log.ts";

export default defineCommand({
	meta: { name: "report", description: "Draw a run's log, also of one that goes on, as one HTML page." },
	args: {
		run: { type: "positional", description: "A JSON log (log-json), or a folder with one.", required: true },
		"all-runs": { type: "boolean", description: "Draw all runs that the log holds as one; default: the latest." },
		output: { type: "string", description: "Page to write; default: the log's name with .html, in this folder." },
	},
	run: ({ args }) => {
		const [, second] = args._;
		if (second !== undefined) {
			throw new UserError(`mimo report draws one run; ${second} is a second one.`, exitCodes.usage);
		}
		const log = readRunLog(args.run, { allRuns: args["all-runs"] ?? false });
		const page = args.output ?? `${basename(log.file, extname(log.file))}.html`;
		const text = reportPage(log, Date.now());
		try {
			writeFileSync(page, text);
		} catch (error) {
			throw new UserError(`The page ${page} cannot be written: ${(error as Error).message}.`);
		}
		note(`${page}: ${log.steps} steps, ${(text.length / 1024).toFixed(0)} KiB.`);
		if (log.earlierRuns > 0) {
			const runs = log.earlierRuns === 1 ? "An earlier run" : `${log.earlierRuns} earlier runs`;
			note(`${runs} of ${log.file} ${log.earlierRuns === 1 ? "is" : "are"} left out; --all-runs draws all as one.`);
		}
	},
});
