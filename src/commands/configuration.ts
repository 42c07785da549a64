/** The configuration of a command's arguments, with the keys that folders of weights among them decide. */
import { readModelKeys } from "../checkpoint/hf/model-keys.ts";
import type { CommandFlags } from "../config/flags.ts";
import { type ResolvedConfiguration, resolveConfiguration } from "../config/resolve.ts";
import type { Key } from "../config/schema.ts";
import type { Entry } from "../config/sources.ts";

/** resolveConfiguration with the keys that folders of weights decide. */
export function configurationOfArguments(
	args: readonly string[],
	commandFlags: CommandFlags = {},
	options: {
		readonly trains?: boolean;
		readonly beneath?: (given: readonly Entry[]) => readonly Entry[];
		readonly unchecked?: readonly Key[];
	} = {},
): ResolvedConfiguration {
	return resolveConfiguration(args, commandFlags, { ...options, folders: readModelKeys });
}
