/** The script of `mimo completion bash`. */
import { alternatives, type CommandLine, configurationFlags, flagCases, quoted, type Values } from "./command-lines.ts";

export function bashScript(lines: readonly CommandLine[]): string {
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
${lines.map((line) => flagCases(line.flags, `${line.path} `, answer)).join("")}  esac
  case "$path" in
    ${alternatives(configured)}) configuration=yes ;;
  esac
  if [[ $configuration ]]; then
    case "$flag" in
${flagCases(configurationFlags, "", answer, "  ")}    esac
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

function answer(values: Values): string {
	if (values === "text") return "";
	const offer = values === "path" ? "-f" : `-W ${quoted((values as readonly string[]).join(" "))}`;
	return `${values === "path" ? "compopt -o filenames 2>/dev/null; " : ""}COMPREPLY=($(compgen ${offer} -- "$word")); `;
}
