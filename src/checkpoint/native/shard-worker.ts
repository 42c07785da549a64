/** The thread of AsyncShardWriter: an entry point of its own. */

import { bytesOfType } from "../store.ts";
import type { ShardAnswer, ShardJob } from "./async-writer.ts";
import { writeShard } from "./writer.ts";

declare const self: Worker;

self.onmessage = ({ data: job }: MessageEvent<ShardJob>) => {
	let answer: ShardAnswer;
	try {
		const entries = job.entries.map(({ memory, byteOffset, ...entry }) => ({
			...entry,
			data: () => new Uint8Array(memory, byteOffset, bytesOfType({ dtype: entry.dtype, shape: entry.sizes })),
		}));
		answer = { report: writeShard(job.folder, job.rank, entries, job.fileBytes ? { fileBytes: job.fileBytes } : {}) };
	} catch (error) {
		answer = { failure: (error as Error).message };
	}
	self.postMessage(answer);
};
