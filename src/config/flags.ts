/**
 * Command-line arguments → configuration entries. Flags are keys with two dashes; the last of a repeated flag counts. Items of a
 * list are arguments of their own or lie between commas.
 */

import type { ValueType } from "./field.ts";
import { keyHint } from "./names-elsewhere.ts";
import { fieldOf, keyOf, spellings } from "./schema.ts";
import type { Entry, Problem } from "./sources.ts";

/** Switches of a command itself, beside the configuration keys. */
export interface CommandFlags {
	/** Name without dashes → whether it takes a value. */
	readonly [name: string]: boolean;
}

export interface ParsedFlags {
	readonly entries: readonly Entry[];
	/** Values of the command's own flags; "" for switches. */
	readonly command: Readonly<Record<string, string>>;
	readonly problems: readonly Problem[];
}

/** Reads `args`. Throws no errors: every mistake is in `problems`. */
export function parseFlags(args: readonly string[], commandFlags: CommandFlags): ParsedFlags {
	const entries: Entry[] = [];
	const command: Record<string, string> = {};
	const problems: Problem[] = [];
	const refuse = (where: string, message: string) => problems.push({ where, message });
	let at = 0;

	/** The argument after a flag, unless that is another flag. */
	const following = (): string | undefined => {
		const next = args[at];
		if (next === undefined || isFlag(next, commandFlags)) return undefined;
		at++;
		return next;
	};

	while (at < args.length) {
		const argument = args[at++]!;
		if (!argument.startsWith("--") || argument === "--") {
			refuse(argument, "this is not a flag; flags start with -- and take one value");
			continue;
		}
		const equals = argument.indexOf("=");
		const name = argument.slice(2, equals < 0 ? undefined : equals);
		const attached = equals < 0 ? undefined : argument.slice(equals + 1);
		if (Object.hasOwn(commandFlags, name)) {
			const value = commandFlags[name] ? (attached ?? following()) : (attached ?? "");
			if (value === undefined) refuse(`--${name}`, "a value has to follow");
			else command[name] = value;
			continue;
		}
		const negated = name.startsWith("no-") || name.startsWith("no_") ? keyOf(name.slice(3)) : undefined;
		const key = keyOf(name) ?? negated;
		if (key === undefined || (key === negated && fieldOf(key).type.kind !== "boolean")) {
			refuse(`--${name}`, `there is no such flag${nearestFlag(name, commandFlags)}`);
			// Skips the unknown flag's values, which would be reported as further mistakes.
			while (attached === undefined && following() !== undefined);
			continue;
		}
		const { type } = fieldOf(key);
		const where = `--${name}`;
		const add = (value: unknown) => entries.push({ key, value, origin: { source: "flag", name: where } });
		if (key === negated && keyOf(name) === undefined) {
			if (attached === undefined) add(false);
			else refuse(where, "it takes no value");
		} else if (type.kind === "boolean") {
			const spelled = attached ?? (args[at] === "true" || args[at] === "false" ? args[at++] : "true");
			add(spelled === "true" ? true : spelled === "false" ? false : spelled);
		} else if (type.kind === "list") {
			const given = attached === undefined ? [] : [attached];
			for (let next = attached === undefined ? following() : undefined; next !== undefined; next = following()) {
				given.push(next);
			}
			const values = given.flatMap((items) => items.split(","));
			if (values.length === 0) refuse(where, `a value has to follow: ${type.allowed}`);
			else add(values.map((value) => valueOfText(value, type)));
		} else {
			const value = attached ?? following();
			if (value === undefined) refuse(where, `a value has to follow: ${type.allowed}`);
			else add(valueOfText(value, type));
		}
	}
	return { entries, command, problems };
}

function isFlag(argument: string, commandFlags: CommandFlags): boolean {
	return /^--[a-z]/.test(argument) || (argument.startsWith("--") && Object.hasOwn(commandFlags, argument.slice(2)));
}

function nearestFlag(name: string, commandFlags: CommandFlags): string {
	return keyHint(name, [...spellings, ...Object.keys(commandFlags)], "--");
}

/** Converts a number's text for a numeric key; other text is left to the schema's check. */
function valueOfText(value: string, type: ValueType<unknown>): unknown {
	return type.numeric && /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(value) ? Number(value) : value;
}
