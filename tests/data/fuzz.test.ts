/**
 * Random damage to everything that a data set is read from: no crash, no hang, only named errors. Small seeded counts
 * here, 10⁶ cases of each reader under MIMO_TEST_FULL; `npm run test:sanitize` runs the image decoders under ASan.
 */
import { beforeAll, expect, test } from "bun:test";
import { SampleError } from "../../src/data/energon/errors.ts";
import { flatten } from "../../src/data/energon/format/flatten.ts";
import { indexJsonl, JsonlReader } from "../../src/data/energon/format/jsonl.ts";
import { readMetadataset } from "../../src/data/energon/format/metadataset.ts";
import { jsonlIndexName, tarIndexName } from "../../src/data/energon/format/names.ts";
import { OffsetIndex } from "../../src/data/energon/format/offset-index.ts";
import { TarError } from "../../src/data/energon/format/tar.ts";
import { SplitPartReader } from "../../src/data/energon/format/tar-reader.ts";
import { readShardCounts, readSplitPart } from "../../src/data/energon/format/webdataset.ts";
import { decodeState } from "../../src/data/energon/loader/state.ts";
import { indexShard } from "../../src/data/energon/prepare/shard-index.ts";
import type { RandomAccessFile, Storage } from "../../src/data/energon/storage/storage.ts";
import { UserError } from "../../src/native/errors.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { damage, generator, type Random } from "../damage.ts";
import { png, tar } from "./fixtures.ts";
import { smallImages } from "./small-images.ts";

const cases = process.env.MIMO_TEST_FULL ? 1_000_000 : 1_500;

/** Files in memory. */
class MemoryStorage implements Storage {
	readonly files = new Map<string, Uint8Array>();

	open(path: string): RandomAccessFile {
		const bytes = this.#get(path);
		return {
			path,
			size: bytes.length,
			read: (offset, length) => bytes.subarray(offset, Math.min(bytes.length, offset + length)),
			close: () => {},
		};
	}

	readText(path: string): string {
		return new TextDecoder().decode(this.#get(path));
	}

	isFile(path: string): boolean {
		return this.files.has(path);
	}

	isFolder(path: string): boolean {
		return [...this.files.keys()].some((file) => file.startsWith(`${path}/`));
	}

	#get(path: string): Uint8Array {
		const bytes = this.files.get(path);
		if (bytes === undefined) throw new UserError(`${path} does not exist.`);
		return bytes;
	}
}

const storage = new MemoryStorage();
const put = (path: string, content: Uint8Array | string) => storage.files.set(path, Buffer.from(content));

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

const named = [UserError, SampleError, TarError];

/** Of this process: what others do on the machine must not look like a hang. */
function processorSeconds(): number {
	const { user, system } = process.cpuUsage();
	return (user + system) / 1e6;
}

/** Runs `parse` on damaged inputs: it returns, or throws a named error. Returns how many were accepted. */
function fuzz(seed: number, make: (random: Random) => () => unknown): number {
	const random = generator(seed);
	let accepted = 0;
	let slowest = 0;
	for (let i = 0; i < cases; i++) {
		const parse = make(random);
		const started = processorSeconds();
		try {
			parse();
			accepted++;
		} catch (error) {
			if (!named.some((kind) => error instanceof kind)) throw error;
			if ((error as Error).message.length <= 10) throw error;
		}
		slowest = Math.max(slowest, processorSeconds() - started);
	}
	expect(slowest).toBeLessThan(2);
	return accepted;
}

const shard = tar([
	["a.txt", "first"],
	["a.json", '{"x": 1}'],
	[`${"long/".repeat(30)}b.txt`, "second"],
	["c.txt", "third ".repeat(100)],
]);

const ustar = [..."ustar"].map((letter) => letter.charCodeAt(0));

/** Damages a tar; half of the time its headers' sums are made right again, so that more than the sum is looked at. */
function damagedTar(random: Random): Uint8Array {
	const bytes = damage(shard, random);
	if (random(2) === 0) return bytes;
	for (let at = 0; at + 512 <= bytes.length; at += 512) {
		const header = bytes.subarray(at, at + 512);
		if (!ustar.every((byte, i) => header[257 + i] === byte)) continue;
		header.fill(0x20, 148, 156);
		let sum = 0;
		for (let i = 0; i < 512; i++) sum += header[i]!;
		header.set(Buffer.from(`${sum.toString(8).padStart(6, "0")}\0 `), 148);
	}
	return bytes;
}

const trainPart = () => readSplitPart(storage, "set", "train", null);

function readAll(part = trainPart()): number {
	const reader = new SplitPartReader(storage, "set", part, { wanted: null, openShards: 1 });
	let bytes = 0;
	for (const [i] of Array.from({ length: Math.min(9, part.shards[0]!.count) }).entries()) {
		for (const content of reader.read(i)?.parts.values() ?? []) bytes += content.length;
	}
	return bytes;
}

function prepared(): void {
	const { offsets } = indexShard({
		path: "",
		size: shard.length,
		read: (o, n) => shard.subarray(o, o + n),
		close() {},
	});
	put("set/0.tar", shard);
	put(tarIndexName("set/0.tar"), OffsetIndex.encode(offsets));
	put("set/.nv-meta/.info.json", '{"energon_version": "7.4.0", "shard_counts": {"0.tar": 3}}');
	put("set/.nv-meta/split.yaml", "split_parts:\n  train:\n  - 0.tar\nexclude: []\n");
}

test("tar files, indexed and read through a whole index", () => {
	prepared();
	expect(readAll()).toBe(5 + 8 + 6 + 600);
	const part = trainPart();
	const accepted = fuzz(1, (random) => {
		const bytes = damagedTar(random);
		return () => {
			put("set/0.tar", bytes);
			indexShard(storage.open("set/0.tar"));
			return readAll(part);
		};
	});
	expect(accepted).toBeGreaterThan(cases / 50);
	expect(accepted).toBeLessThan(cases);
});

test("tar indexes", () => {
	prepared();
	const index = storage.files.get("set/0.tar.idx")!;
	const part = trainPart();
	const accepted = fuzz(2, (random) => {
		const bytes = damage(index, random);
		return () => {
			put("set/0.tar.idx", bytes);
			return readAll(part);
		};
	});
	expect(accepted).toBeLessThan(cases);
});

test(".info.json", () => {
	prepared();
	const info = storage.files.get("set/.nv-meta/.info.json")!;
	const accepted = fuzz(3, (random) => {
		const bytes = damage(info, random);
		return () => {
			put("set/.nv-meta/.info.json", bytes);
			readShardCounts(storage, "set");
			return readAll();
		};
	});
	expect(accepted).toBeGreaterThan(0);
	expect(accepted).toBeLessThan(cases);
});

test("metadatasets", () => {
	prepared();
	// One feature each, because YAML takes its time.
	const version2 = "__class__: MetadatasetV2\nsplits:\n  train:\n";
	const one = `${version2}    path: set\n    subset: {range: [0%, 50%]}\n`;
	const blend = `${version2}    blend:\n    - path: set\n      weight: 3\n    - {path: set, split_part: train}\n`;
	const epochized = `${version2}    blend_epochized:\n    - path: set\n      repetitions: 1.5\n      subflavors:\n        a: b\n`;
	const version1 = "splits:\n  train:\n    datasets:\n    - path: set\n      subflavor: x\n";
	const texts = [one, blend, epochized, version1];
	const inherited = { splitPart: "train", subflavors: {}, multiplier: 1, subset: null };
	const read = (content: Uint8Array | string) => {
		put("blend.yaml", content);
		return flatten(readMetadataset(storage, "blend.yaml"), inherited).leaves.length;
	};
	expect(texts.map(read)).toEqual([1, 2, 1, 1]);
	const accepted = fuzz(4, (random) => {
		const bytes = damage(Buffer.from(texts[random(texts.length)]!), random);
		return () => read(bytes);
	});
	expect(accepted).toBeGreaterThan(cases / 500);
	for (const hostile of ["[".repeat(20_000), "{a: ".repeat(20_000), "- ".repeat(20_000), `&a [${"*a,".repeat(999)}]`]) {
		expect(() => read(hostile)).toThrow(UserError);
	}
});

test("JSONL files and their indexes", () => {
	const text = '{"text": "a"}\n\n{"text": "b"}\n{"n": [1, 2]}\n';
	const accepted = fuzz(5, (random) => {
		const [bytes, index] = [damage(Buffer.from(text), random), random(2) === 0];
		return () => {
			put("f.jsonl", index ? text : bytes);
			const offsets = OffsetIndex.encode(indexJsonl(storage.files.get("f.jsonl")!, "f.jsonl"));
			put(jsonlIndexName("f.jsonl"), index ? damage(offsets, random) : offsets);
			const reader = new JsonlReader(storage, "f.jsonl");
			for (let i = 0; i < Math.min(9, reader.length); i++) reader.read(i);
		};
	});
	expect(accepted).toBeGreaterThan(0);
});

test("JPEG and PNG files", () => {
	const files = [...Object.values(smallImages), png(7, 5)];
	for (const file of files) expect(images.decode(file).pixels.length).toBeGreaterThan(20);
	const accepted = fuzz(6, (random) => {
		const bytes = damage(files[random(files.length)]!, random);
		return () => {
			const { width, height } = images.inspect(bytes);
			// A size that the damage made huge is refused or takes long to allocate, which is not what is looked for.
			if (width * height > 1 << 22) throw new UserError("The image is too large for this test.");
			return images.decode(bytes);
		};
	});
	expect(accepted).toBeGreaterThan(cases / 50);
	expect(accepted).toBeLessThan(cases);
});

test("loader states", () => {
	const json = { format: "mimo data loader", version: 1, settings: {}, rank: 0, worldSize: 1, numWorkers: 1 };
	const rest = { nextWorker: 0, ended: [false], workers: [{ index: 0, dataset: { name: "x" }, random: null }] };
	const text = JSON.stringify({ ...json, ...rest });
	const random = { numpy: { words: "", position: 0, gauss: null } };
	const half = { ...json, ...rest, workers: [{ index: 0, dataset: {}, random }] };
	expect(() => decodeState(Bun.zstdCompressSync(Buffer.from(JSON.stringify(half))))).toThrow(
		"the position of worker 0 cannot be read",
	);
	fuzz(7, (random) => {
		const inner = damage(Buffer.from(text), random);
		const bytes = random(4) === 0 ? damage(Bun.zstdCompressSync(inner), random) : Bun.zstdCompressSync(inner);
		return () => decodeState(bytes);
	});
});
