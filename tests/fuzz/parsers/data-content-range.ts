import { RemoteError, sizeOf } from "../../../src/data/energon/storage/http.ts";
import { type FuzzParser, inputName } from "../parser.ts";

export default {
	about: "Content-Range of a server's answer",
	open: () => ({
		seeds: [Buffer.from("bytes 10-19/100"), Buffer.from("bytes 10-11/12")],
		dictionary: ["/*", "bytes ", "-", "9007199254740993", "99999999999999999999999", "0x10", "1e3", " "],
		parse: (bytes) => {
			const value = Buffer.from(bytes)
				.toString("latin1")
				.replace(/[^\x20-\x7e]/g, "");
			const size = sizeOf(inputName, new Headers({ "content-range": value }), 10, 10);
			if (!Number.isSafeInteger(size) || size < 11) throw new Error(`A file of ${size} bytes was taken.`);
		},
		refuses: (error) => error instanceof RemoteError && error.message.includes(inputName),
	}),
} satisfies FuzzParser;
