/**
 * Flags of commands: those that a command declares to citty, null where a flag is not given, and those of commands that take the
 * configuration's keys too.
 */
import { defineCommand } from "citty";
import {
	type DtypeTag,
	isDtypeTag,
	isFloatDtype,
	placedFolder,
	readModelKeys,
	readStoredDataKeys,
} from "../checkpoint/index.ts";
import type { CommandFlags } from "../config/flags.ts";
import { askedHelp } from "../config/help.ts";
import { type ResolvedConfiguration, type ResolveOptions, resolveConfiguration } from "../config/resolve.ts";
import type { FolderReader } from "../config/sources.ts";
import { readVocabularySize } from "../data/text/configured-tokenizer.ts";
import { print } from "../observe/output.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";

export type Arguments = { readonly [name: string]: unknown; readonly _: readonly string[] };

/** The error about a flag's value; `allowed` ends the sentence. */
export function flagError(name: string, value: string, allowed: string): UserError {
	return new UserError(`--${name} is ${JSON.stringify(value)}; allowed is ${allowed}.`, exitCodes.usage);
}

export function text(given: Arguments, name: string): string | null {
	const value = given[name];
	return typeof value === "string" && value !== "" ? value : null;
}

/** Items between commas; empty where the flag is not given. */
export function list(given: Arguments, name: string): string[] {
	return (text(given, name) ?? "").split(",").filter((item) => item !== "");
}

export function whole(given: Arguments, name: string): number | null {
	const value = text(given, name);
	if (value === null) return null;
	if (!/^[0-9]{1,12}$/.test(value)) throw flagError(name, value, "an integer from 0");
	return Number(value);
}

export function choice<const Name extends string>(
	given: Arguments,
	name: string,
	allowed: readonly Name[],
): Name | null {
	const value = text(given, name);
	if (value === null) return null;
	const found = allowed.find((candidate) => candidate === value);
	if (!found) throw flagError(name, value, allowed.join(", "));
	return found;
}

/** Bytes of --max-shard-size: "500MB", "5GB", or a number of bytes. */
export function bytesOf(size: string): number {
	const match = /^([0-9]{1,12})\s*(B|kB|KB|MB|GB|TB)?$/.exec(size);
	if (!match) throw flagError("max-shard-size", size, "a size such as 500MB or 5GB");
	const factor = { B: 1, kB: 1e3, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }[match[2] ?? "B"]!;
	return Number(match[1]) * factor;
}

/** The float type of --dtype. */
export function dtypeOf(given: Arguments): DtypeTag | null {
	const value = text(given, "dtype");
	if (value === null) return null;
	const name = value.toUpperCase();
	if (isDtypeTag(name) && isFloatDtype(name)) return name;
	throw flagError("dtype", value, "F32, BF16, F16, F64");
}

// Commands whose flags are the configuration's keys and a few of their own.

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

// Resolves a command's arguments to a configuration; folders among them give keys of the model and of its data.

/** `resolveConfiguration` with the folders of weights that the arguments name, also as on Hugging Face's Hub, or in a store. */
export function configurationOfArguments(
	args: readonly string[],
	commandFlags: CommandFlags = {},
	options: Omit<ResolveOptions, "folders" | "place"> = {},
): ResolvedConfiguration {
	const folders: FolderReader = (given) => [
		...readStoredDataKeys(given),
		...readModelKeys(given),
		...readVocabularySize(given),
	];
	return resolveConfiguration(args, commandFlags, { ...options, folders, place: placedFolder });
}

// The PATH argument of the `mimo data` commands, and how a remote one is read.

export const pathArgument = {
	type: "positional",
	required: true,
	description: "Prepared folder, JSONL file or metadataset.",
	valueHint: "PATH",
} as const;

/** A flag of `mimo train` that commands without its configuration take too. */
export const redirectsFlag = "data-private-redirects";

/** PATH without trailing slashes. */
export function datasetPath(given: string): string {
	return given.replace(/(?<=.)\/+$/, "");
}
