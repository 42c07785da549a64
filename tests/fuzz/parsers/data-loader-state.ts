import { decodeState } from "../../../src/data/energon/loader/state.ts";
import { UserError } from "../../../src/system/errors.ts";
import type { FuzzParser } from "../parser.ts";

const worker = { index: 0, dataset: { __class__: "x", rng: { $generator: "" } }, random: null };
const json = { format: "mimo data loader", version: 1, settings: { a: "1" }, rank: 0, worldSize: 1, numWorkers: 1 };

export default {
	about: "states of data loaders",
	open: () => ({
		seeds: [
			Buffer.from(
				JSON.stringify({
					...json,
					nextWorker: 0,
					ended: [false],
					workers: [{ ...worker, dataset: { __class__: "x" } }],
				}),
			),
		],
		json: true,
		dictionary: ['{"$generator":"AAAA"}', '{"torch":"","numpy":null,"python":null}', "null", "-1"],
		parse: (bytes) => decodeState(Bun.zstdCompressSync(new Uint8Array(bytes))),
		refuses: (error) => error instanceof UserError && /^The (loader state|file)/.test(error.message),
	}),
} satisfies FuzzParser;
