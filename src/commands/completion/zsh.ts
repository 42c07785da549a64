/** The script of `mimo completion zsh`. */
import { alternatives, type CommandLine, configurationFlags, flagCases, quoted, type Values } from "./command-lines.ts";

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
${lines.map((line) => flagCases(line.flags, `${line.path} `, answer)).join("")}  esac
  case "$route" in
    ${alternatives(configured)}) configuration=yes ;;
  esac
  if [[ -n $configuration ]]; then
    case "$flag" in
${flagCases(configurationFlags, "", answer, "  ")}    esac
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

function answer(values: Values): string {
	if (values === "text") return "";
	return values === "path" ? "_files; " : `compadd -- ${(values as readonly string[]).map(quoted).join(" ")}; `;
}
