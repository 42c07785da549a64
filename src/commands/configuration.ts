/** Resolves a command's arguments to a configuration; folders among them give keys of the model and of its data. */
import { hubFolder, readModelKeys, readStoredDataKeys } from "../checkpoint/index.ts";
import type { CommandFlags } from "../config/flags.ts";
import { type ResolvedConfiguration, resolveConfiguration } from "../config/resolve.ts";
import type { Key, TrainingConfiguration } from "../config/schema.ts";
import type { Entry, FolderReader } from "../config/sources.ts";

/** `resolveConfiguration` with the folders of weights that the arguments name, also as on Hugging Face's Hub. */
export function configurationOfArguments(
	args: readonly string[],
	commandFlags: CommandFlags = {},
	options: {
		readonly trains?: boolean;
		readonly beneath?: (given: readonly Entry[]) => readonly Entry[];
		readonly unchecked?: readonly Key[];
		readonly epoch?: (configuration: TrainingConfiguration) => number;
		readonly gpus?: number | null;
	} = {},
): ResolvedConfiguration {
	const folders: FolderReader = (given) => [...readStoredDataKeys(given), ...readModelKeys(given)];
	return resolveConfiguration(args, commandFlags, { ...options, folders, place: hubFolder });
}
