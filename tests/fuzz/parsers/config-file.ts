import { parseText } from "../../../src/config/file.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { UserError } from "../../../src/system/errors.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const text = `preset: nemotron-tiny
train-iters: 100   # a comment
lr: 3.0e-4
hybrid-layer-pattern: "M*E-"
num-layers: 4
bf16: true
llm-tp: 2
vocab-size: 512
`;

export default {
	about: "a YAML configuration file, and the configuration it makes",
	open: () => ({
		seeds: [text, "preset: nemotron-vlm-tiny\ntrain-iters: 100\nencoder-tp: 2\n"].map((seed) => Buffer.from(seed)),
		dictionary: [
			...["&a ", "*a", "!!binary ", "<<: ", "? ", "- ", "|\n", ">\n", "\t", "---\n", "...\n", "%YAML 1.1\n", "{a: 1}"],
			...["num-experts: ", "seq-length: ", "hidden-size: ", "4294967296", "1e999", ".inf", ".nan", "~", "null", "0o7"],
		],
		parse: (bytes) => {
			const { entries, problems } = parseText(new TextDecoder().decode(bytes), inputName);
			for (const { where } of problems) {
				if (!where.includes(inputName)) throw new Error(`A problem names ${where}, not its file.`);
			}
			if (problems.length > 0) throw new UserError(`${inputName} has ${problems.length} mistakes.`);
			configurationOf(Object.fromEntries(entries.map(({ key, value }) => [key, value])));
		},
		refuses: (error) => error instanceof UserError,
	}),
} satisfies FuzzParser;
