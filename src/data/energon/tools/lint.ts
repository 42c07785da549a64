/** Reads everything of a data set: tars against their indexes, every sample decoded. Each problem is reported by name. */
import { mediaOfCrude, mediaOfRecord } from "../../vision-language/media.ts";
import { loadSample } from "../dataset.ts";
import { BrokenSampleError, SampleError } from "../errors.ts";
import { type DatasetConfig, readDatasetConfig } from "../format/dataset-config.ts";
import type { ImageDecoder } from "../format/decode.ts";
import { decodeParts } from "../format/decode.ts";
import { flatten } from "../format/flatten.ts";
import { JsonlReader } from "../format/jsonl.ts";
import { readMetadataset } from "../format/metadataset.ts";
import { INDEX_SQLITE, META_FOLDER, tarIndexName } from "../format/names.ts";
import { OffsetIndex } from "../format/offset-index.ts";
import { SplitPartReader } from "../format/tar-reader.ts";
import { datasetKind, expandAll, readShardCounts, readSplits, type Shard } from "../format/webdataset.ts";
import { type IndexedSample, indexShard } from "../prepare/shard-index.ts";
import type { RawSample } from "../sample.ts";
import { isUrl, resolvePath, type Storage } from "../storage/storage.ts";
import { unprepared } from "../unprepared.ts";
import { KeyIndexCheck } from "./key-index-check.ts";

export interface Problem {
	/** Shard or file. */
	readonly where: string;
	/** Sample, if it is one's. */
	readonly key: string | null;
	readonly what: string;
}

export interface LintResult {
	readonly shards: number;
	readonly samples: number;
	/** Samples with a problem. */
	readonly bad: number;
	readonly problems: number;
}

/** Checks a folder, a JSONL file, or all data sets of a metadataset. `report` is called for every problem. */
export function lint(
	storage: Storage,
	path: string,
	images: ImageDecoder,
	report: (problem: Problem) => void,
): LintResult {
	const linter = new Linter(storage, images, report);
	linter.dataset(path);
	return linter.result;
}

class Linter {
	#shards = 0;
	#samples = 0;
	#bad = 0;
	#problems = 0;
	/** Shard of every key of the data set at hand: keys are unique. */
	readonly #keys = new Map<string, string>();

	constructor(
		private readonly storage: Storage,
		private readonly images: ImageDecoder,
		private readonly onProblem: (problem: Problem) => void,
	) {}

	get result(): LintResult {
		return { shards: this.#shards, samples: this.#samples, bad: this.#bad, problems: this.#problems };
	}

	#report(where: string, key: string | null, error: unknown): void {
		this.#problems++;
		if (key !== null) this.#bad++;
		this.onProblem({ where, key, what: error instanceof Error ? error.message : String(error) });
	}

	dataset(path: string): void {
		const kind = datasetKind(this.storage, path);
		if (kind === "jsonl") this.#jsonl(path);
		else if (kind === "webdataset") this.#folder(path);
		else if (kind === "metadataset") this.#metadataset(path);
		else throw unprepared(path);
	}

	#metadataset(path: string): void {
		const metadataset = readMetadataset(this.storage, path);
		const paths = new Set<string>();
		for (const part of metadataset.splits.keys()) {
			const inherited = { splitPart: part, subflavors: {}, multiplier: 1, subset: null };
			for (const { source } of flatten(metadataset, inherited).leaves) {
				if (source.kind === "dataset") paths.add(source.path);
				else for (const joined of source.join.parts) paths.add(joined.path);
			}
		}
		for (const inner of paths) {
			this.#keys.clear();
			this.dataset(inner);
		}
	}

	#jsonl(path: string): void {
		const reader = new JsonlReader(this.storage, path);
		this.#shards++;
		for (let index = 0; index < reader.length; index++) {
			this.#samples++;
			this.#try(path, String(index), () => {
				const { json } = decodeParts(reader.read(index), { images: this.images });
				const media = mediaOfRecord(json);
				if (media !== null) throw new SampleError(`Record ${index} cannot be trained on: ${media}.`);
			});
		}
	}

	#folder(path: string): void {
		const counts = readShardCounts(this.storage, path);
		const config = readDatasetConfig(this.storage, path, null);
		const { splits, path: splitPath } = readSplits(this.storage, path, null);
		for (const [part, patterns] of splits.parts) {
			const unknown = expandAll(patterns, splitPath).filter((name) => !counts.has(name));
			for (const name of unknown) {
				this.#report(splitPath, null, `the part ${part} names the shard ${name}, which was not prepared`);
			}
		}
		const keys = this.#keyIndex(path);
		for (const [number, [name, count]] of [...counts].entries()) {
			const shard = { name, path: resolvePath(path, name), count };
			this.#shards++;
			const samples = this.#structure(shard);
			keys?.compare(number, name, samples);
			this.#contents(path, shard, config);
		}
		keys?.end(counts.size);
	}

	/** The tar as it is against its index and count. Returns its samples, or null where it cannot be walked. */
	#structure({ name, path, count }: Shard): readonly IndexedSample[] | null {
		try {
			const file = this.storage.open(path);
			const { offsets, samples, cutOff } = indexShard(file);
			file.close();
			if (cutOff !== null) this.#report(name, null, `the tar ends early: ${cutOff}`);
			if (samples.length !== count) {
				this.#report(name, null, `the tar has ${samples.length} samples, .info.json says ${count}`);
			}
			this.#offsets(name, path, offsets);
			for (const { key } of samples) {
				const other = this.#keys.get(key);
				if (other !== undefined) this.#report(name, null, `the key ${key} is in ${other} too`);
				this.#keys.set(key, name);
			}
			return samples;
		} catch (error) {
			this.#report(name, null, error);
			return null;
		}
	}

	/** The index of a tar against what it should be. */
	#offsets(name: string, path: string, offsets: readonly number[]): void {
		const index = OffsetIndex.open(this.storage, tarIndexName(path));
		try {
			if (index.trailingBytes > 0) this.#report(name, null, `the index has ${index.trailingBytes} bytes too many`);
			if (index.length !== offsets.length) {
				this.#report(name, null, `the index has ${index.length} entries, the tar needs ${offsets.length}`);
				return;
			}
			const at = offsets.findIndex((offset, i) => index.at(i) !== offset);
			if (at < 0) return;
			this.#report(name, null, `the index has ${index.at(at)} as entry ${at}, the tar has ${offsets[at]}`);
		} finally {
			index.close();
		}
	}

	/** The index by key of a local folder; null where there is none: only joins need it. */
	#keyIndex(folder: string): KeyIndexCheck | null {
		const path = resolvePath(folder, `${META_FOLDER}/${INDEX_SQLITE}`);
		if (isUrl(folder) || !this.storage.isFile(path)) return null;
		return new KeyIndexCheck(path, (what) => this.#report(path, null, what));
	}

	#contents(folder: string, shard: Shard, config: DatasetConfig): void {
		const part = { shards: [shard], excludes: new Set<string>(), allShards: [shard.name] };
		const reader = new SplitPartReader(this.storage, folder, part, { wanted: null, openShards: 1 });
		for (let index = 0; index < shard.count; index++) {
			let raw: RawSample | null = null;
			try {
				raw = reader.read(index);
			} catch (error) {
				// Without its files nothing of the shard can be read, as was reported; beyond its index there is nothing.
				if (!(error instanceof BrokenSampleError)) return;
				if (index > 0 && index >= this.#entries(shard)) return;
				this.#report(shard.name, `sample ${index}`, error);
			}
			this.#samples++;
			if (raw === null) continue;
			const found: RawSample = raw;
			const record = { restoreKey: ["Webdataset", index], data: [found] };
			this.#try(shard.name, found.key, () => {
				const { type, fields } = loadSample(found, record, config, {}, { images: this.images });
				const media = type === "CrudeSample" ? mediaOfCrude(fields) : null;
				if (media !== null) throw new SampleError(`Sample ${found.key} cannot be trained on: ${media}.`);
			});
		}
	}

	/** Samples that the index of a shard knows. */
	#entries({ path }: Shard): number {
		const index = OffsetIndex.open(this.storage, tarIndexName(path));
		try {
			return index.length - 1;
		} finally {
			index.close();
		}
	}

	#try(where: string, key: string, run: () => void): void {
		try {
			run();
		} catch (error) {
			this.#report(where, key, error);
		}
	}
}
