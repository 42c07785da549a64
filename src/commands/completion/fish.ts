/** The script of `mimo completion fish`. */
import { type CommandLine, configurationFlags, type Flag, type Values } from "./command-lines.ts";

export function fishScript(lines: readonly CommandLine[]): string {
	const configured = lines.filter((line) => line.configured).map(({ path }) => path);
	const summary = (path: string) => lines.find((line) => line.path === path)!.summary;
	return `# Completion of mimo for fish: mimo completion fish >~/.config/fish/completions/mimo.fish
function __mimo_at --description 'Whether one of these commands is being typed'
    set --local path mimo
    for word in (commandline --tokenize --cut-at-cursor --current-process)[2..]
        contains -- "$path $word" ${lines
					.slice(1)
					.map(({ path }) => quoted(path))
					.join(" ")}; or break
        set path "$path $word"
    end
    contains -- $path $argv
end
complete --command mimo --no-files
${lines
	.flatMap(({ path, below, flags }) => [
		...below.map((name) =>
			complete([path], `--arguments ${quoted(name)} --description ${quoted(summary(`${path} ${name}`))}`),
		),
		...(below.length === 0 ? [complete([path], "--force-files")] : []),
		...flags.map((flag) => complete([path], option(flag))),
	])
	.join("\n")}
${configurationFlags.map((flag) => complete(configured, option(flag))).join("\n")}
`;
}

function complete(paths: readonly string[], what: string): string {
	return `complete --command mimo --condition ${quoted(`__mimo_at ${paths.map(quoted).join(" ")}`)} ${what}`;
}

function option({ name, description, values }: Flag): string {
	const said = description === "" ? "" : ` --description ${quoted(description)}`;
	return `--long-option ${name}${said}${followed(values)}`;
}

function followed(values: Values): string {
	if (values === "none") return "";
	if (values === "path") return " --require-parameter --force-files";
	if (values === "text") return " --exclusive";
	return ` --exclusive --arguments ${quoted(values.join(" "))}`;
}

/** Text between single quotes of fish. */
const quoted = (text: string) => `'${text.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'`;
