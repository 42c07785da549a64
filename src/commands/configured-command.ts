/** Commands whose flags are the configuration's keys and a few of their own. */
import { defineCommand } from "citty";
import { askedHelp } from "../config/help.ts";
import { print } from "../observe/output.ts";

interface Definition<Flags> {
	readonly name: string;
	/** One sentence, for the table of commands. */
	readonly description: string;
	/** The usage line and the command's own flags. */
	readonly help: string;
	/** Flags that are not keys of the configuration, and whether they take a value. */
	readonly ownFlags: Flags;
	readonly run: (args: readonly string[]) => Promise<void>;
}

/** Defines the command. `--help` prints its help with the everyday keys, `--help all` with every key, `--help WORD` those about a word. */
export function configuredCommand<Flags>({ name, description, help, ownFlags, run }: Definition<Flags>) {
	const command = defineCommand({
		meta: { name, description },
		run: async ({ rawArgs }) => {
			const asked = askedHelp(rawArgs, help);
			if (asked === null) await run(rawArgs);
			else print(asked);
		},
	});
	return { ...command, ownFlags };
}
