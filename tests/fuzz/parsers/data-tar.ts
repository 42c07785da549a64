import { TarError } from "../../../src/data/energon/format/tar.ts";
import { indexShard } from "../../../src/data/energon/prepare/shard-index.ts";
import { DataSet, refusesSample, shard, shardPath } from "../data-set.ts";
import type { FuzzParser } from "../parser.ts";

const isHeader = (header: Uint8Array) => Buffer.from(header.subarray(257, 262)).toString("latin1") === "ustar";

export default {
	about: "tar files: walked for their index, and read through a whole index",
	open: () => {
		const set = new DataSet();
		return {
			seeds: [shard],
			dictionary: [
				"ustar\0" + "00",
				"././@LongLink",
				"27 size=77777777777777777\n",
				"11 path=a\n",
				"\x80\0\0\0\0\0\0\x7f",
			],
			// Headers' sums are made right again.
			repair: (bytes) => {
				const whole = bytes.slice();
				for (let at = 0; at + 512 <= whole.length; at += 512) {
					const header = whole.subarray(at, at + 512);
					if (!isHeader(header)) continue;
					header.fill(0x20, 148, 156);
					const sum = header.reduce((total, byte) => total + byte, 0);
					header.set(Buffer.from(`${sum.toString(8).padStart(6, "0")}\0 `), 148);
				}
				return whole;
			},
			parse: (bytes) => {
				set.put(shardPath, bytes);
				indexShard(set.storage.open(shardPath));
				set.read();
			},
			refuses: (error) => error instanceof TarError || refusesSample(error),
		};
	},
} satisfies FuzzParser;
