import { JsonlReader, OffsetIndex } from "../../../src/data/energon/format/jsonl.ts";
import { jsonlIndexName } from "../../../src/data/energon/format/names.ts";
import { MemoryStorage } from "../memory-storage.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const path = `${inputName}.jsonl`;
const text = Buffer.from('{"text": "a"}\n{"text": "b"}\n');

export default {
	about: "the index of a JSONL file",
	open: () => {
		const storage = new MemoryStorage();
		storage.files.set(path, text);
		return {
			seeds: [OffsetIndex.encode([0, 14, 28])],
			dictionary: [new Uint8Array(8).fill(255), Uint8Array.of(28, 0, 0, 0, 0, 0, 0, 0)],
			parse: (bytes) => {
				storage.files.set(jsonlIndexName(path), bytes);
				const reader = new JsonlReader(storage, path);
				for (let i = 0; i < Math.min(9, reader.length); i++) reader.read(i);
			},
		};
	},
} satisfies FuzzParser;
