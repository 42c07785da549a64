/** The script of `mimo completion zsh`. */
import { byValues, type CommandLine, configurationFlags, type Flag, quoted, type Values } from "./command-lines.ts";

export function zshScript(lines: readonly CommandLine[]): string {
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
${lines.map((line) => answers(line.flags, `${line.path} `)).join("")}  esac
  case "$route" in
    ${alternatives(configured)}) configuration=yes ;;
  esac
  if [[ -n $configuration ]]; then
    case "$flag" in
${answers(configurationFlags, "", "  ")}    esac
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

function answers(flags: readonly Flag[], prefix: string, indent = ""): string {
	return byValues(flags)
		.filter(({ values }) => values !== "none")
		.map(({ flags: names, values }) => {
			return `    ${indent}${alternatives(names.map((name) => prefix + name))}) ${answer(values)}return ;;\n`;
		})
		.join("");
}

function answer(values: Values): string {
	if (values === "text") return "";
	return values === "path" ? "_files; " : `compadd -- ${(values as readonly string[]).map(quoted).join(" ")}; `;
}

const alternatives = (words: readonly string[]) => words.map(quoted).join("|");
