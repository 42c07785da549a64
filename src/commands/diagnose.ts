/** `mimo diagnose`: the recordings of a run's ranks in, the diagnosis that the run would have printed out. */
import { defineCommand } from "citty";
import { NativeError, UserError } from "../native/errors.ts";
import { openLibrary } from "../native/library.ts";
import { Run } from "../native/run.ts";
import { diagnose, findRecordings, takeSnapshot } from "../parallel/diagnosis.ts";

export default defineCommand({
	meta: { name: "diagnose", description: "Why a run ended, from what its ranks have left." },
	args: {
		folder: { type: "positional", description: "The run's flight-recorder-dir.", required: true },
		json: { type: "boolean", description: "Print everything that is known of every rank as JSON." },
	},
	run: async ({ args }) => {
		const paths = findRecordings(args.folder);
		try {
			using run = Run.readRecordings(await openLibrary("cpu"), paths);
			const snapshot = takeSnapshot(run, run.watch()!);
			console.log(args.json ? JSON.stringify(snapshot, null, 2) : diagnose(snapshot).join("\n"));
		} catch (error) {
			throw error instanceof NativeError ? new UserError(error.message) : error;
		}
	},
});
