/** Large data sets that take little room: every shard is one file under many names. */
import { linkSync, mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { OffsetIndex } from "../../src/data/energon/format/jsonl.ts";
import { indexShard } from "../../src/data/energon/prepare/shard-index.ts";
import { LocalFile } from "../../src/data/energon/storage/open.ts";
import { type Member, type Scratch, tar } from "./fixtures.ts";

/** A crude set of `shards` × `samples` samples with one part of `bytes` bytes each. Keys repeat from shard to shard. */
export function largeSet(scratch: Scratch, name: string, shards: number, samples: number, bytes: number): string {
	const content = Buffer.alloc(bytes, "x");
	const members = Array.from({ length: samples }, (_, i): Member => [`${String(i).padStart(6, "0")}.bin`, content]);
	const first = scratch.file(`${name}/shard-0000.tar`, tar(members));
	const file = LocalFile.open(first);
	const index = scratch.file(`${name}/shard-0000.tar.idx`, OffsetIndex.encode(indexShard(file).offsets));
	file.close();
	const folder = join(scratch.path, name);
	const names = Array.from({ length: shards }, (_, i) => `shard-${String(i).padStart(4, "0")}.tar`);
	for (const shard of names.slice(1)) {
		linkSync(first, join(folder, shard));
		linkSync(index, join(folder, `${shard}.idx`));
	}
	const meta = join(folder, ".nv-meta");
	mkdirSync(meta);
	const counts = Object.fromEntries(names.map((shard) => [shard, samples]));
	writeFileSync(join(meta, ".info.json"), JSON.stringify({ energon_version: null, shard_counts: counts }));
	writeFileSync(join(meta, "dataset.yaml"), "__module__: megatron.energon\n__class__: CrudeWebdataset\n");
	const last = String(shards - 1).padStart(4, "0");
	writeFileSync(join(meta, "split.yaml"), `split_parts:\n  train:\n  - shard-{0000..${last}}.tar\nexclude: []\n`);
	return folder;
}
