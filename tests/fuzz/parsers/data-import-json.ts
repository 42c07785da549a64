import { jsonSource } from "../../../src/data/import/open-source.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

export default {
	about: "JSON lists and JSON lines, cut into records",
	open: () => {
		const file = new FileInput(".json");
		return {
			seeds: [
				Buffer.from('[{"image": "a.png", "caption": "x]"},\n {"text": "b\\"}"}, 3, "s"]\n'),
				Buffer.from('\ufeff{"text": "a"}\n\n{"text": "b"}\r\n'),
			],
			dictionary: ["[", "]", "\\", '"', ",", "\n", "{}", "\ufeff"],
			parse: (bytes) => {
				const source = jsonSource([{ path: file.with(bytes), part: null }], null);
				for (const _ of source.rows([])) {
					// Every record is read.
				}
			},
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
