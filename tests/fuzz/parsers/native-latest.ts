import { parseLatest } from "../../../src/checkpoint/native/reader.ts";
import { indexLimits, jsonText } from "../../../src/system/json.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const latest = { format: "mimo-native", dir: "iter_0000012", iteration: 12, indexSha256: "0123456789abcdef".repeat(4) };

export default {
	about: "latest.json of a folder of native checkpoints",
	open: () => ({
		json: true,
		seeds: [latest, { ...latest, dir: "release", iteration: null }].map((value) => Buffer.from(JSON.stringify(value))),
		dictionary: ["iter_", "release", "../", "\\u0000", "/etc/passwd"],
		parse: (bytes) => {
			const { dir } = parseLatest(jsonText(bytes, inputName, indexLimits), inputName);
			if (/[/\0]|\.\./.test(dir)) throw new Error(`${JSON.stringify(dir)} leads out of the folder.`);
		},
	}),
} satisfies FuzzParser;
