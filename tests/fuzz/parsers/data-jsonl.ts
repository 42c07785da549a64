import { indexJsonl, JsonlReader, OffsetIndex } from "../../../src/data/energon/format/jsonl.ts";
import { jsonlIndexName } from "../../../src/data/energon/format/names.ts";
import { MemoryStorage } from "../memory-storage.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const path = `${inputName}.jsonl`;

export default {
	about: "JSONL files, indexed and read",
	open: () => {
		const storage = new MemoryStorage();
		return {
			seeds: [Buffer.from('{"text": "a"}\n\n{"text": "b"}\r\n{"n": [1, 2]}')],
			dictionary: ["\n", "{}", "\u000b", " "],
			parse: (bytes) => {
				storage.files.set(path, bytes);
				storage.files.set(jsonlIndexName(path), OffsetIndex.encode(indexJsonl(bytes, path)));
				const reader = new JsonlReader(storage, path);
				for (let i = 0; i < reader.length; i++) reader.read(i);
			},
		};
	},
} satisfies FuzzParser;
