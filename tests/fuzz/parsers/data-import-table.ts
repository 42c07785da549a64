import { tableSource } from "../../../src/data/import/sources/table.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

export default {
	about: "CSV tables",
	open: () => {
		const file = new FileInput(".csv");
		return {
			seeds: [Buffer.from('image,caption\r\na.png,"x ""y"",\nz"\r\n\nb.png,plain\n')],
			dictionary: ['"', '""', ",", "\r\n", "\n", "\ufeff", "\0"],
			parse: async (bytes) => {
				const options = { header: true, delimiter: null };
				const source = await tableSource([{ path: file.with(bytes), part: null }], options, null);
				for await (const _ of source.rows([])) {
					// Every row is read.
				}
			},
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
