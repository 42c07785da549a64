/** Resolves a command's arguments to a configuration; a Hugging Face folder among them gives the model's keys. */
import { hubFolder } from "../checkpoint/hf/hub.ts";
import { readModelKeys } from "../checkpoint/hf/model-keys.ts";
import type { CommandFlags } from "../config/flags.ts";
import { type ResolvedConfiguration, resolveConfiguration } from "../config/resolve.ts";
import type { Key } from "../config/schema.ts";
import type { Entry } from "../config/sources.ts";

/** `resolveConfiguration` with `readModelKeys` as its reader of folders, which may be named as on Hugging Face's Hub. */
export function configurationOfArguments(
	args: readonly string[],
	commandFlags: CommandFlags = {},
	options: {
		readonly trains?: boolean;
		readonly beneath?: (given: readonly Entry[]) => readonly Entry[];
		readonly unchecked?: readonly Key[];
	} = {},
): ResolvedConfiguration {
	return resolveConfiguration(args, commandFlags, { ...options, folders: readModelKeys, place: hubFolder });
}
