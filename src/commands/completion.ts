/** `mimo completion SHELL`: a script that completes commands, flags and their values in that shell. */
import { defineCommand } from "citty";
import { writeOut } from "../observe/output.ts";
import { bashScript } from "./completion/bash.ts";
import { type CommandTable, commandLines } from "./completion/command-lines.ts";
import { fishScript } from "./completion/fish.ts";
import { zshScript } from "./completion/zsh.ts";

const scripts = { bash: bashScript, zsh: zshScript, fish: fishScript } as const;
/** Shells whose scripts a release contains. */
export const completionShells = Object.keys(scripts);

/** Builds the command `completion` for the command table, which contains it too. */
export function completionCommand(table: CommandTable) {
	const shells = Object.entries(scripts).map(([shell, script]) => {
		const command = defineCommand({
			meta: { name: shell, description: `Print the script for ${shell}; its first lines say where it goes.` },
			args: {},
			run: async () => writeOut(script(await commandLines(table))),
		});
		return [shell, async () => command] as const;
	});
	return defineCommand({
		meta: { name: "completion", description: "Print a script that completes commands and flags in a shell." },
		subCommands: Object.fromEntries(shells),
	});
}
