/** A small prepared data set in memory, one of whose files is the input. */
import { SampleError } from "../../src/data/energon/errors.ts";
import { OffsetIndex } from "../../src/data/energon/format/jsonl.ts";
import { tarIndexName } from "../../src/data/energon/format/names.ts";
import { SplitPartReader } from "../../src/data/energon/format/tar.ts";
import { readSplitPart } from "../../src/data/energon/format/webdataset.ts";
import { indexShard } from "../../src/data/energon/prepare/shard-index.ts";
import { tar } from "../data/fixtures.ts";
import { MemoryStorage } from "./memory-storage.ts";
import { inputName, isNamedRefusal } from "./parser.ts";

/** Its folder: refusals name it. */
export const folder = inputName;
export const meta = `${folder}/.nv-meta`;
export const shardPath = `${folder}/0.tar`;

export const shard: Uint8Array = tar([
	["a.txt", "first"],
	["a.json", '{"x": 1}'],
	[`${"long/".repeat(30)}b.txt`, "second"],
	["c.txt", "third ".repeat(100)],
]);

export const info = '{"energon_version": "7.4.0", "shard_counts": {"0.tar": 3}}';
export const split = 'split_parts:\n  train:\n  - 0.tar\n  val: ["{0..0}.tar"]\nexclude: [0.tar/c]\n';
export const typed =
	"sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt,json[x]\nsubflavors:\n  a: 1\n";
export const crude =
	"__module__: megatron.energon\n__class__: CrudeWebdataset\npart_filter: [txt]\nshuffle_over_epochs: 2\n";

export class DataSet {
	readonly storage = new MemoryStorage();

	constructor() {
		this.put(shardPath, shard);
		this.put(tarIndexName(shardPath), OffsetIndex.encode(indexShard(this.storage.open(shardPath)).offsets));
		this.put(`${meta}/.info.json`, info);
		this.put(`${meta}/split.yaml`, split);
		this.put(`${meta}/dataset.yaml`, typed);
	}

	put(path: string, content: Uint8Array | string): void {
		this.storage.files.set(path, Buffer.from(content));
	}

	/** Reads the first samples of the training part. */
	read(): void {
		const part = readSplitPart(this.storage, folder, "train", null);
		const reader = new SplitPartReader(this.storage, folder, part, { wanted: null, openShards: 1 });
		const count = part.shards.reduce((sum, shard) => sum + shard.count, 0);
		for (let i = 0; i < Math.min(9, count); i++) reader.read(i);
	}
}

/** A refusal of a sample instead of the whole run counts too, by the same rules. */
export function refusesSample(error: unknown): boolean {
	if (!(error instanceof SampleError)) return isNamedRefusal(error);
	return error.message.length > 10 && error.message.length <= 10_000;
}
