import { readFileSync } from "node:fs";
import { join } from "node:path";
import { noColumns } from "../../../src/data/import/row.ts";
import { arrowSource } from "../../../src/data/import/sources/arrow.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

const golden = join(import.meta.dir, "../../golden/import");
const name = "data-00000-of-00001.arrow";

export default {
	about: "Arrow streams of save_to_disk",
	open: () => {
		const file = new FileInput(".arrow");
		return {
			seeds: ["captions", "talk/train"].map((folder) => readFileSync(join(golden, folder, name))),
			parse: (bytes) => {
				for (const _ of arrowSource([{ path: file.with(bytes), part: null }], noColumns, null).rows([])) {
					// Every row is read.
				}
			},
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
