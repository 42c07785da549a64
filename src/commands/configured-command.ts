/** Commands whose flags are the configuration's keys and a few of their own. */
import { defineCommand } from "citty";
import { askedHelp } from "../config/help.ts";
import { print } from "../observe/output.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { flagError } from "./arguments.ts";

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

// Reads a command's own flags, beside the configuration's keys, that may be repeated or are numbers.

/** Separates every value of `--name VALUE` or `--name=VALUE` from the other arguments. */
export function takeRepeated(
	args: readonly string[],
	name: string,
): { readonly values: readonly string[]; readonly rest: readonly string[] } {
	const values: string[] = [];
	const rest: string[] = [];
	for (let at = 0; at < args.length; at++) {
		const argument = args[at]!;
		if (argument.startsWith(`--${name}=`)) values.push(argument.slice(name.length + 3));
		else if (argument === `--${name}`) {
			const value = args[++at];
			if (value === undefined) throw new UserError(`--${name}: a value has to follow.`, exitCodes.usage);
			values.push(value);
		} else rest.push(argument);
	}
	return { values, rest };
}

/** A number among a command's flags; `missing` where it is not given. Throws a UserError unless `allows` it. */
export function numberFlag<Missing>(
	flags: Readonly<Record<string, string>>,
	name: string,
	missing: Missing,
	allowed: string,
	allows: (value: number) => boolean,
): number | Missing {
	const text = flags[name];
	if (text === undefined) return missing;
	const value = /^\d+(\.\d+)?([eE][+-]?\d+)?$|^\.\d+$/.test(text) ? Number(text) : Number.NaN;
	if (!allows(value)) throw flagError(name, text, allowed);
	return value;
}

/** An integer from 1 among a command's flags; `missing` where it is not given. */
export function countFlag<Missing>(
	flags: Readonly<Record<string, string>>,
	name: string,
	missing: Missing,
): number | Missing {
	return numberFlag(flags, name, missing, "an integer from 1", (value) => Number.isSafeInteger(value) && value >= 1);
}
