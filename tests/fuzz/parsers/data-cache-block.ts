import { readFileSync, statSync } from "node:fs";
import { BlockWriter, readBlock } from "../../../src/data/energon/storage/block-cache.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

class Refused extends Error {}

export default {
	about: "blocks of the cache of remote data: none is taken that was changed",
	open: () => {
		const file = new FileInput();
		const cache = { path: file.folder, key: new Uint8Array(32).fill(7) };
		const content = Buffer.from("a block of a remote file");
		new BlockWriter(cache, 1 << 20).write(file.path, content);
		return {
			seeds: [readFileSync(file.path)],
			parse: (bytes) => {
				const found = readBlock(cache, file.with(bytes), content.length);
				if (found === null) {
					// A file that is not a block is removed, so that it is fetched again.
					if (statSync(file.path, { throwIfNoEntry: false }) !== undefined) throw new Error("The damaged block stays.");
					throw new Refused();
				}
				if (!content.equals(found)) throw new Error("A changed block was taken.");
			},
			refuses: (error) => error instanceof Refused,
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
