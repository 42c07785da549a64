import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { JOURNAL, readJournal } from "../../../src/data/import/journal.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const part = { samples: 3, next: 1, open: [{ number: 0, bytes: 1024, samples: 3 }] };
const journal = {
	version: 1,
	settings: { from: "json", data: "0" },
	stage: "rows",
	position: [0, 10, 2],
	rows: 4,
	samples: 3,
	images: 3,
	shards: { train: part, val: { ...part, open: [null] }, test: part },
	skippedBytes: 10,
	skipped: [{ reason: "r", count: 1, examples: ["e"] }],
};

export default {
	about: "journals of imports",
	open: () => {
		const folder = mkdtempSync(join(tmpdir(), `${inputName}-`));
		return {
			seeds: [Buffer.from(JSON.stringify(journal))],
			json: true,
			dictionary: ["-1", "1e99", "null"],
			parse: (bytes) => {
				writeFileSync(join(folder, JOURNAL), bytes);
				readJournal(folder);
			},
			[Symbol.dispose]: () => rmSync(folder, { recursive: true }),
		};
	},
} satisfies FuzzParser;
