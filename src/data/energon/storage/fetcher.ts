/** Entry point of a fetching thread, which fetches blocks of remote files into the cache for a data thread. */
import { existsSync } from "node:fs";
import { BlockWriter, blockPath, type CacheFolder } from "./block-cache.ts";
import { LateError, RemoteError, readRemote, statRemote } from "./http.ts";
import { Answer, type FetchRequest, give } from "./remote.ts";
import type { RemoteOptions, RemoteVersion } from "./storage.ts";

declare const self: Worker;

let options: RemoteOptions;
let folder: CacheFolder;
let writer: BlockWriter;
/** Blocks that are being fetched, by their file, so that a block is fetched once. */
const coming = new Map<string, Promise<void>>();

async function bring(version: RemoteVersion, block: number): Promise<void> {
	const path = blockPath(folder, version, block);
	const running = coming.get(path);
	if (running) return await running;
	const offset = block * options.blockBytes;
	const length = Math.min(options.blockBytes, version.size - offset);
	const fetched = readRemote(version, offset, length, options).then((bytes) => writer.write(path, bytes));
	coming.set(path, fetched);
	try {
		await fetched;
	} finally {
		coming.delete(path);
	}
}

async function answer(request: FetchRequest): Promise<void> {
	if (request.kind === "options") {
		({ options, folder } = request);
		writer = new BlockWriter(folder, options.cacheBytes);
		return;
	}
	try {
		if (request.kind === "stat") {
			const { size, etag } = await statRemote(request.url, options);
			give(request.answer, Answer.done, etag ?? "", size);
		} else {
			const { version, block } = request;
			// A block that is requested ahead may already be in the cache; a block that a thread waits for is absent or damaged.
			if (request.answer || !existsSync(blockPath(folder, version, block))) await bring(version, block);
			if (request.answer) give(request.answer, Answer.done, "");
		}
	} catch (error) {
		// The failure of a block that no thread waits for shows when it is requested again.
		if (!request.answer) return;
		const missing = error instanceof RemoteError && error.missing;
		const state = missing ? Answer.missing : error instanceof LateError ? Answer.late : Answer.failed;
		give(request.answer, state, (error as Error).message);
	}
}

self.onmessage = ({ data }: MessageEvent<FetchRequest>) => void answer(data);
