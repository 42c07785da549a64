/** The text of docs/configuration.md. `bun tests/config/documentation.ts` writes it; a test compares. */
import { configurationMarkdown } from "../../src/config/help.ts";

const introduction = `# Configuration

<!-- Written by \`bun tests/config/documentation.ts\` from src/config/keys; edit those. -->

Every key is a flag (\`--hidden-size 128\`) and a line of a YAML file (\`hidden-size: 128\`); underscores are accepted for
dashes. Names are Megatron's wherever it has one. A preset is overruled by \`--config FILE.yaml\`, both by flags; paths in
a file are relative to that file. A switch is turned off by \`--no-NAME\` or \`NAME: false\`. \`mimo train --print-config\`
shows every value and where it came from, \`mimo train --help WORD\` the flags about a word.

Two differences to remember: \`hidden-dropout\` and \`attention-dropout\` are 0 unless given, while Megatron drops a
tenth; and all loss tokens of a step weigh the same, while Megatron averages the means of its microbatches unless
\`--calculate-per-token-loss\` is given: here \`calculate-per-token-loss: false\` does.`;

export const documentationFile = `${import.meta.dir}/../../docs/configuration.md`;

export function documentation(): string {
	return `${introduction}\n\n${configurationMarkdown()}\n`;
}

if (import.meta.main) await Bun.write(documentationFile, documentation());
