/** `mimo diagnose`: prints the diagnosis of a run from its ranks' recordings. */
import { defineCommand } from "citty";
import { findRecordings, takeSnapshot } from "../launch/diagnosis.ts";
import { type Library, openLibrary } from "../native/library.ts";
import { Run } from "../native/run.ts";
import { warn } from "../observe/messages.ts";
import { print } from "../observe/output.ts";
import { NativeError, UserError } from "../system/errors.ts";

export default defineCommand({
	meta: { name: "diagnose", description: "Explain why a run ended, from its ranks' recordings." },
	args: {
		folder: { type: "positional", description: "The run's flight-recorder-dir.", required: true },
		json: { type: "boolean", description: "Print the state of every rank as JSON." },
	},
	run: async ({ args }) => {
		const library = await openLibrary("cpu");
		const { whole, damaged } = separate(library, findRecordings(args.folder));
		if (whole.length === 0) throw new UserError(damaged[0]!);
		for (const sentence of damaged) warn(`${sentence} It is left out.`);
		using run = read(library, whole);
		if (args.json) print(JSON.stringify(takeSnapshot(run, run.watch()!), null, 2));
		else print(run.diagnosis());
	},
});

/** Reads recordings of one run. Throws a UserError that names a file that is no recording or is of another run. */
function read(library: Library, paths: readonly string[]): Run {
	try {
		return Run.readRecordings(library, paths);
	} catch (error) {
		throw error instanceof NativeError ? new UserError(error.message) : error;
	}
}

/** Separates whole recordings from damaged ones, which a rank leaves when it is killed while writing; of these, the errors. */
function separate(library: Library, paths: readonly string[]): { whole: string[]; damaged: string[] } {
	const whole: string[] = [];
	const damaged: string[] = [];
	for (const path of paths) {
		try {
			read(library, [path])[Symbol.dispose]();
			whole.push(path);
		} catch (error) {
			if (!(error instanceof UserError)) throw error;
			damaged.push(error.message);
		}
	}
	return { whole, damaged };
}
