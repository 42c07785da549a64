import { readFileSync } from "node:fs";
import { join } from "node:path";
import { noColumns } from "../../../src/data/import/row.ts";
import { parquetSource } from "../../../src/data/import/sources/parquet.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

const golden = join(import.meta.dir, "../../golden/import");

export default {
	about: "Parquet files of Hugging Face data sets",
	open: () => {
		const file = new FileInput(".parquet");
		return {
			seeds: ["captions.parquet", "captions.zstd.parquet", "captions.lz4.parquet", "talk.parquet"].map((name) =>
				readFileSync(join(golden, name)),
			),
			parse: async (bytes) => {
				const source = await parquetSource([{ path: file.with(bytes), part: null }], noColumns, null);
				for await (const _ of source.rows([])) {
					// Every row is read.
				}
			},
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
