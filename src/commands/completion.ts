/** `mimo completion SHELL`: a script that completes commands, flags and their values in that shell. */
import { type ArgsDef, type CommandDef, defineCommand } from "citty";
import type { Field } from "../config/field.ts";
import type { CommandFlags } from "../config/flags.ts";
import { fieldOf, keyOf, keys } from "../config/schema.ts";
import { writeOut } from "../observe/output.ts";

function zshScript(lines: readonly CommandLine[]): string {
	const configured = lines.filter((line) => line.configured).map(({ path }) => path);
	return `#compdef mimo
# Completion of mimo for zsh: mimo completion zsh >"\${fpath[1]}/_mimo"
_mimo() {
  local flag=$words[CURRENT-1] route=mimo configuration= at
  local -a commands flags
  for ((at = 2; at < CURRENT; at++)); do
    case "$route $words[at]" in
      ${alternatives(lines.slice(1).map(({ path }) => path))}) route+=" $words[at]" ;;
      *) break ;;
    esac
  done
  case "$route $flag" in
${lines.map((line) => flagCases(line.flags, `${line.path} `, zshAnswer)).join("")}  esac
  case "$route" in
    ${alternatives(configured)}) configuration=yes ;;
  esac
  if [[ -n $configuration ]]; then
    case "$flag" in
${flagCases(configurationFlags, "", zshAnswer, "  ")}    esac
  fi
  case "$route" in
${lines.map((line) => described(line, lines)).join("")}  esac
  if [[ -n $configuration ]]; then
    flags+=(
${configurationFlags.map((flag) => `      ${item(`--${flag.name}`, flag.description)}\n`).join("")}    )
  fi
  if [[ $words[CURRENT] == -* ]]; then _describe -o flag flags; return; fi
  if (( $#commands )); then _describe command commands; else _files; fi
}
if [[ $funcstack[1] == _mimo ]]; then _mimo "$@"; else compdef _mimo mimo; fi
`;
}

function described({ path, below, flags }: CommandLine, lines: readonly CommandLine[]): string {
	const summary = (name: string) => lines.find((line) => line.path === `${path} ${name}`)!.summary;
	const commands = below.map((name) => item(name, summary(name))).join(" ");
	const own = flags.map((flag) => item(`--${flag.name}`, flag.description)).join(" ");
	return `    ${quoted(path)}) commands=(${commands}) flags=(${own}) ;;\n`;
}

/** "name:description" for _describe; a colon of the name would end it. */
const item = (name: string, description: string) => quoted(`${name.replaceAll(":", "\\:")}:${description}`);

function zshAnswer(values: Values): string {
	if (values === "text") return "";
	return values === "path" ? "_files; " : `compadd -- ${(values as readonly string[]).map(quoted).join(" ")}; `;
}

function fishScript(lines: readonly CommandLine[]): string {
	const configured = lines.filter((line) => line.configured).map(({ path }) => path);
	const summary = (path: string) => lines.find((line) => line.path === path)!.summary;
	return `# Completion of mimo for fish: mimo completion fish >~/.config/fish/completions/mimo.fish
function __mimo_at --description 'Whether one of these commands is being typed'
    set --local path mimo
    for word in (commandline --tokenize --cut-at-cursor --current-process)[2..]
        contains -- "$path $word" ${lines
					.slice(1)
					.map(({ path }) => fishQuoted(path))
					.join(" ")}; or break
        set path "$path $word"
    end
    contains -- $path $argv
end
complete --command mimo --no-files
${lines
	.flatMap(({ path, below, flags }) => [
		...below.map((name) =>
			complete([path], `--arguments ${fishQuoted(name)} --description ${fishQuoted(summary(`${path} ${name}`))}`),
		),
		...(below.length === 0 ? [complete([path], "--force-files")] : []),
		...flags.map((flag) => complete([path], option(flag))),
	])
	.join("\n")}
${configurationFlags.map((flag) => complete(configured, option(flag))).join("\n")}
`;
}

function complete(paths: readonly string[], what: string): string {
	return `complete --command mimo --condition ${fishQuoted(`__mimo_at ${paths.map(fishQuoted).join(" ")}`)} ${what}`;
}

function option({ name, description, values }: Flag): string {
	const said = description === "" ? "" : ` --description ${fishQuoted(description)}`;
	return `--long-option ${name}${said}${followed(values)}`;
}

function followed(values: Values): string {
	if (values === "none") return "";
	if (values === "path") return " --require-parameter --force-files";
	if (values === "text") return " --exclusive";
	return ` --exclusive --arguments ${fishQuoted(values.join(" "))}`;
}

/** Text between single quotes of fish. */
const fishQuoted = (text: string) => `'${text.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'`;

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

function bashScript(lines: readonly CommandLine[]): string {
	const configured = lines.filter((line) => line.configured).map(({ path }) => path);
	const words = ({ below, flags }: CommandLine) => [...below, ...flags.map(({ name }) => `--${name}`)].join(" ");
	return `# Completion of mimo for bash: source <(mimo completion bash)
_mimo() {
  local word=\${COMP_WORDS[COMP_CWORD]} flag=\${COMP_WORDS[COMP_CWORD-1]} path=mimo at words= configuration=
  # bash takes --flag=value for three words.
  if [[ $word == "=" ]]; then word=; elif [[ $flag == "=" ]]; then flag=\${COMP_WORDS[COMP_CWORD-2]}; fi
  for ((at = 1; at < COMP_CWORD; at++)); do
    case "$path \${COMP_WORDS[at]}" in
      ${alternatives(lines.slice(1).map(({ path }) => path))}) path+=" \${COMP_WORDS[at]}" ;;
      *) break ;;
    esac
  done
  COMPREPLY=()
  case "$path $flag" in
${lines.map((line) => flagCases(line.flags, `${line.path} `, bashAnswer)).join("")}  esac
  case "$path" in
    ${alternatives(configured)}) configuration=yes ;;
  esac
  if [[ $configuration ]]; then
    case "$flag" in
${flagCases(configurationFlags, "", bashAnswer, "  ")}    esac
  fi
  case "$path" in
${lines.map((line) => `    ${quoted(line.path)}) words=${quoted(words(line))} ;;\n`).join("")}  esac
  if [[ $configuration ]]; then
    words+=${quoted(configurationFlags.map(({ name }) => ` --${name}`).join(""))}
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [[ $word != -* ]]; then compopt -o default 2>/dev/null; fi
}
complete -F _mimo mimo
`;
}

function bashAnswer(values: Values): string {
	if (values === "text") return "";
	const offer = values === "path" ? "-f" : `-W ${quoted((values as readonly string[]).join(" "))}`;
	return `${values === "path" ? "compopt -o filenames 2>/dev/null; " : ""}COMPREPLY=($(compgen ${offer} -- "$word")); `;
}

// The completable words: from the command table, the commands' own flags and the configuration's keys.

/** The values of a flag: none (a switch), paths, free text, or fixed words. */
type Values = "none" | "path" | "text" | readonly string[];

interface Flag {
	/** Name without dashes. */
	readonly name: string;
	readonly description: string;
	readonly values: Values;
}

interface CommandLine {
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
async function commandLines(table: CommandTable): Promise<CommandLine[]> {
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
const configurationFlags: readonly Flag[] = keys.map((name) => {
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
function quoted(text: string): string {
	return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Words as a pattern of bash's and zsh's `case`. */
const alternatives = (words: readonly string[]): string => words.map(quoted).join("|");

/** Cases of bash and zsh for flags with values; `answer` returns the shell commands that offer them. */
function flagCases(flags: readonly Flag[], prefix: string, answer: (values: Values) => string, indent = ""): string {
	return byValues(flags)
		.filter(({ values }) => values !== "none")
		.map(({ flags: names, values }) => {
			return `    ${indent}${alternatives(names.map((name) => prefix + name))}) ${answer(values)}return ;;\n`;
		})
		.join("");
}
