/**
 * Command-line arguments → configuration entries. Flags are keys with two dashes; the last of a repeated flag counts. Items of a
 * list are arguments of their own or lie between commas.
 */

import type { ValueType } from "./field.ts";
import { keyHint } from "./names-elsewhere.ts";
import { fieldOf, keyOf, spellings } from "./schema.ts";
import type { Aside, Entry, Given, Origin, Problem } from "./sources.ts";
import { takeUpstream } from "./upstream-flags.ts";

/** Switches of a command itself, beside the configuration keys. */
export interface CommandFlags {
	/** Name without dashes → whether it takes a value, or the values that it may have. */
	readonly [name: string]: boolean | readonly string[];
}

export interface ParsedFlags extends Given {
	/** Values of the command's own flags; "" for switches. */
	readonly command: Readonly<Record<string, string>>;
}

/** Walks over the arguments. */
class ArgumentReader {
	#at = 0;

	constructor(
		readonly args: readonly string[],
		readonly commandFlags: CommandFlags,
	) {}

	next(): string | undefined {
		return this.args[this.#at++];
	}

	/** The next argument, unless it is a flag. */
	value(): string | undefined {
		const next = this.args[this.#at];
		return next === undefined || isFlag(next, this.commandFlags) ? undefined : this.next();
	}

	/** The arguments up to the next flag. */
	values(): string[] {
		const values: string[] = [];
		for (let next = this.value(); next !== undefined; next = this.value()) values.push(next);
		return values;
	}

	/** "true" or "false" if it is the next argument. */
	truth(): string | undefined {
		const next = this.args[this.#at];
		return next === "true" || next === "false" ? this.next() : undefined;
	}
}

/** Reads `args`. Throws no errors: every mistake is in `problems`. */
export function parseFlags(args: readonly string[], commandFlags: CommandFlags): ParsedFlags {
	const entries: Entry[] = [];
	const asides: Aside[] = [];
	const notes: string[] = [];
	const command: Record<string, string> = {};
	const problems: Problem[] = [];
	const origin = (name: string): Origin => ({ source: "flag", name });
	const refuse = (where: string, message: string) => problems.push({ where, message });
	const reader = new ArgumentReader(args, commandFlags);
	for (let argument = reader.next(); argument !== undefined; argument = reader.next()) {
		if (!argument.startsWith("--") || argument === "--") {
			refuse(argument, "this is not a flag; flags start with -- and take one value");
			continue;
		}
		const equals = argument.indexOf("=");
		const name = argument.slice(2, equals < 0 ? undefined : equals);
		const attached = equals < 0 ? undefined : argument.slice(equals + 1);
		const where = `--${name}`;
		if (Object.hasOwn(commandFlags, name)) {
			const value = commandFlags[name] ? (attached ?? reader.value()) : (attached ?? "");
			if (value === undefined) refuse(where, "a value has to follow");
			else command[name] = value;
			continue;
		}
		const negated = name.startsWith("no-") || name.startsWith("no_") ? keyOf(name.slice(3)) : undefined;
		const key = keyOf(name) ?? negated;
		if (key === undefined || (key === negated && fieldOf(key).type.kind !== "boolean")) {
			// An unknown flag's values too would be reported as further mistakes.
			const values = attached === undefined ? reader.values() : [attached];
			if (!takeUpstream(name, values, origin(where), { entries, asides, notes, refuse })) {
				refuse(where, `there is no such flag${nearestFlag(name, commandFlags)}`);
			}
			continue;
		}
		const { type } = fieldOf(key);
		if (key === negated && keyOf(name) === undefined) {
			if (attached === undefined) entries.push({ key, value: false, origin: origin(where) });
			else refuse(where, "it takes no value");
			continue;
		}
		const value = readValue(type, attached, reader);
		if (value === undefined) refuse(where, `a value has to follow: ${type.allowed}`);
		else entries.push({ key, value, origin: origin(where) });
	}
	return { entries, asides, notes, command, problems };
}

/** The value of a key's flag: `attached` behind =, or the next arguments; undefined if it is missing. */
function readValue(type: ValueType<unknown>, attached: string | undefined, reader: ArgumentReader): unknown {
	if (type.kind === "boolean") {
		const spelled = attached ?? reader.truth() ?? "true";
		return spelled === "true" ? true : spelled === "false" ? false : spelled;
	}
	if (type.kind === "list") {
		const given = attached === undefined ? reader.values() : [attached];
		// Megatron writes lists of numbers as Python does, such as (127, 0).
		const values = given.flatMap((items) =>
			type.numeric ? items.replaceAll(/[()[\]\s]/g, "").split(",") : items.split(","),
		);
		return values.length === 0 ? undefined : values.map((value) => valueOfText(value, type));
	}
	if (type.kind === "paths") return attached ?? (reader.values().join(" ") || undefined);
	const value = attached ?? reader.value();
	return value === undefined ? undefined : valueOfText(value, type);
}

function isFlag(argument: string, commandFlags: CommandFlags): boolean {
	return /^--[a-z]/.test(argument) || (argument.startsWith("--") && Object.hasOwn(commandFlags, argument.slice(2)));
}

function nearestFlag(name: string, commandFlags: CommandFlags): string {
	return keyHint(name, [...spellings, ...Object.keys(commandFlags)], "--");
}

/** The value of JSON; other text is left to the schema's check. */
function jsonOf(text: string): unknown {
	try {
		return JSON.parse(text);
	} catch {
		return text;
	}
}

/** Converts a number's text for a numeric key, and JSON; other text is left to the schema's check. */
function valueOfText(value: string, type: ValueType<unknown>): unknown {
	if (type.kind === "records") return jsonOf(value);
	return type.numeric && /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(value) ? Number(value) : value;
}
