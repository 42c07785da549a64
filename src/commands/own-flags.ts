/** Reads a command's own flags, beside the configuration's keys, that may be repeated or are numbers. */
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { flagError } from "./arguments.ts";

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
