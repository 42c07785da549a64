/** The completable words: from the command table, the commands' own flags and the configuration's keys. */
import type { ArgsDef, CommandDef } from "citty";
import type { Field } from "../../config/field.ts";
import type { CommandFlags } from "../../config/flags.ts";
import { fieldOf, keyOf, keys } from "../../config/schema.ts";

/** The values of a flag: none (a switch), paths, free text, or fixed words. */
export type Values = "none" | "path" | "text" | readonly string[];

export interface Flag {
	/** Name without dashes. */
	readonly name: string;
	readonly description: string;
	readonly values: Values;
}

export interface CommandLine {
	/** "mimo", "mimo data", "mimo data prepare". */
	readonly path: string;
	readonly summary: string;
	/** Subcommands by name. */
	readonly below: readonly string[];
	/** Flags of the command itself. */
	readonly flags: readonly Flag[];
	/** Whether it also takes the configuration's keys as flags. */
	readonly configured: boolean;
}

// biome-ignore lint/suspicious/noExplicitAny: citty's own type of a command with any arguments.
export type AnyCommand = CommandDef<any> & { readonly ownFlags?: CommandFlags };
export type CommandTable = Readonly<
	Record<string, readonly [summary: string, load: () => Promise<{ readonly default: AnyCommand }>]>
>;

const help: Flag = { name: "help", description: "Show the help.", values: "none" };

/** Every command and subcommand, `mimo` itself first. */
export async function commandLines(table: CommandTable): Promise<CommandLine[]> {
	const version: Flag = {
		name: "version",
		description: "Version, commit, ABI version, native libraries.",
		values: "none",
	};
	const top = { path: "mimo", summary: "", below: Object.keys(table), flags: [help, version], configured: false };
	const commands = await Promise.all(
		Object.entries(table).map(async ([name, [summary, load]]) =>
			linesOf(`mimo ${name}`, summary, (await load()).default),
		),
	);
	return [top, ...commands.flat()];
}

async function linesOf(path: string, summary: string, command: AnyCommand): Promise<CommandLine[]> {
	const below = (command.subCommands ?? {}) as Readonly<Record<string, () => Promise<AnyCommand>>>;
	const lines = await Promise.all(
		Object.entries(below).map(async ([name, load]) => {
			const subcommand = await load();
			const { description = "" } = subcommand.meta as { readonly description?: string };
			return await linesOf(`${path} ${name}`, description, subcommand);
		}),
	);
	const declared = Object.entries((command.args ?? {}) as ArgsDef).flatMap(([name, arg]): Flag[] => {
		if (arg.type === "positional") return [];
		const choices = arg.valueHint?.split("|") ?? [];
		const values = arg.type === "boolean" ? "none" : choices.length > 1 ? choices : "path";
		return [{ name, description: arg.description ?? "", values }];
	});
	// Own flags with the name of a configuration key, such as plan's split, are completed as keys.
	const own = Object.entries(command.ownFlags ?? {})
		.filter(([name]) => keyOf(name) === undefined)
		.map(([name, value]): Flag => ({ name, description: "", values: value === true ? "path" : value || "none" }));
	const configured = command.ownFlags !== undefined;
	const config: Flag[] = configured
		? [{ name: "config", description: "Keys and values, one a line.", values: "path" }]
		: [];
	const flags = [help, ...declared, ...config, ...own];
	return [{ path, summary, below: Object.keys(below), flags, configured }, ...lines.flat()];
}

/** The configuration's keys as flags. */
export const configurationFlags: readonly Flag[] = keys.map((name) => {
	const { type, description } = fieldOf(name);
	return { name, description, values: valuesOf(type) };
});

function valuesOf(type: Field["type"]): Values {
	if (type.kind === "boolean") return "none";
	if (type.kind === "path" || type.kind === "paths") return "path";
	const { options } = type.schema as { readonly options?: readonly string[] };
	return options ?? "text";
}

/** Groups flags that take the same values. */
function byValues(flags: readonly Flag[]): { readonly flags: readonly string[]; readonly values: Values }[] {
	const groups = Map.groupBy(flags, ({ values }) => (typeof values === "string" ? values : values.join(" ")));
	return [...groups.values()].map((group) => ({
		flags: group.map(({ name }) => `--${name}`),
		values: group[0]!.values,
	}));
}

/** Text between single quotes of bash and zsh. */
export function quoted(text: string): string {
	return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Words as a pattern of bash's and zsh's `case`. */
export const alternatives = (words: readonly string[]): string => words.map(quoted).join("|");

/** Cases of bash and zsh for flags with values; `answer` returns the shell commands that offer them. */
export function flagCases(
	flags: readonly Flag[],
	prefix: string,
	answer: (values: Values) => string,
	indent = "",
): string {
	return byValues(flags)
		.filter(({ values }) => values !== "none")
		.map(({ flags: names, values }) => {
			return `    ${indent}${alternatives(names.map((name) => prefix + name))}) ${answer(values)}return ;;\n`;
		})
		.join("");
}
