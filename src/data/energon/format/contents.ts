/**
 * Identifies the content of a data set by samples of its indexes: a resumed run has to read the same data as the saved run.
 */
import { CryptoHasher } from "bun";
import type { Storage } from "../storage/storage.ts";
import { jsonlIndexName, tarIndexName } from "./names.ts";
import type { Shard } from "./webdataset.ts";

/** Number of shards that are hashed, spread over the part, and bytes of each index at its beginning and end. */
const SHARDS = 8;
const INDEX_BYTES = 64 * 1024;

/** Hash of a split part: of the sizes of some of its shards and of the offsets of their samples. */
export function contentsOfShards(storage: Storage, shards: readonly Shard[]): string {
	const hash = new CryptoHasher("sha256");
	const count = Math.min(SHARDS, shards.length);
	for (let i = 0; i < count; i++) {
		const { path } = shards[Math.floor((i * shards.length) / count)]!;
		addFiles(hash, storage, path, tarIndexName(path));
	}
	return hash.digest("hex");
}

/** Hash of a JSONL file: of its size and of the offsets of its records. */
export function contentsOfJsonl(storage: Storage, path: string): string {
	const hash = new CryptoHasher("sha256");
	addFiles(hash, storage, path, jsonlIndexName(path));
	return hash.digest("hex");
}

function addFiles(hash: CryptoHasher, storage: Storage, path: string, indexPath: string): void {
	const data = storage.open(path);
	const index = storage.open(indexPath);
	try {
		hash.update(`${data.size} ${index.size}\0`);
		hash.update(index.read(0, INDEX_BYTES));
		hash.update(index.read(Math.max(0, index.size - INDEX_BYTES), INDEX_BYTES));
	} finally {
		data.close();
		index.close();
	}
}
