/** Reads the lines of a file that may still grow, in bounded memory. */
import { closeSync, openSync, readSync } from "node:fs";

const chunkBytes = 1 << 20;

/** The whole lines of a file, without a last line that is incomplete. */
export function* linesOf(file: string): Generator<string> {
	const descriptor = openSync(file, "r");
	try {
		const chunk = Buffer.alloc(chunkBytes);
		let rest = Buffer.alloc(0);
		for (let count = readSync(descriptor, chunk); count > 0; count = readSync(descriptor, chunk)) {
			const bytes = Buffer.concat([rest, chunk.subarray(0, count)]);
			let begin = 0;
			for (let end = bytes.indexOf(10); end >= 0; end = bytes.indexOf(10, begin)) {
				yield bytes.toString("utf8", begin, end);
				begin = end + 1;
			}
			rest = Buffer.from(bytes.subarray(begin));
		}
	} finally {
		closeSync(descriptor);
	}
}
