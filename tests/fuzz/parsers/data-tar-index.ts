import { tarIndexName } from "../../../src/data/energon/format/names.ts";
import { DataSet, refusesSample, shardPath } from "../data-set.ts";
import type { FuzzParser } from "../parser.ts";

export default {
	about: "the index of a tar file, and samples read by it",
	open: () => {
		const set = new DataSet();
		const path = tarIndexName(shardPath);
		return {
			seeds: [set.storage.files.get(path)!],
			dictionary: [new Uint8Array(8).fill(255), Uint8Array.of(0, 0, 0, 0, 0, 0, 31, 0)],
			parse: (bytes) => {
				set.put(path, bytes);
				set.read();
			},
			refuses: refusesSample,
		};
	},
} satisfies FuzzParser;
