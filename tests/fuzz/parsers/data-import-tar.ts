import { SkippedRow } from "../../../src/data/import/row.ts";
import { tarSource } from "../../../src/data/import/sources/tars.ts";
import { png, tar } from "../../data/fixtures.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

const seed = tar([
	["a.png", png(4, 4)],
	["a.txt", "a dot"],
	["a.json", '{"key": "a", "url": "http://host/a.png"}'],
	["b.png", png(4, 4)],
	["b.json", '{"caption": "b"}'],
]);

export default {
	about: "tar files of samples that are imported",
	open: () => {
		const file = new FileInput(".tar");
		return {
			seeds: [seed],
			dictionary: ["ustar\0" + "00", "././@LongLink", ".json", "\x80\0\0\0\0\0\0\x7f"],
			parse: (bytes) => {
				for (const { fields } of tarSource([{ path: file.with(bytes), part: null }], null).rows([])) {
					if (fields instanceof SkippedRow) throw fields;
				}
			},
			refuses: (error) => error instanceof SkippedRow && error.message.length <= 10_000,
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
