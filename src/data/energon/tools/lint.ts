/** Reads everything of a data set: tars against their indexes, every sample decoded. Each problem is reported by name. */
import { UserError } from "../../../native/errors.ts";
import { loadSample } from "../dataset.ts";
import { expandBraces } from "../format/brace.ts";
import { type DatasetConfig, readDatasetConfig } from "../format/dataset-config.ts";
import type { ImageDecoder } from "../format/decode.ts";
import { decodeParts } from "../format/decode.ts";
import { JsonlReader } from "../format/jsonl.ts";
import { flatten, readMetadataset } from "../format/metadataset.ts";
import { tarIndexName } from "../format/names.ts";
import { OffsetIndex } from "../format/offset-index.ts";
import { SplitPartReader } from "../format/tar-reader.ts";
import { datasetKind, readShardCounts, readSplits, type Shard } from "../format/webdataset.ts";
import { indexShard } from "../prepare/shard-index.ts";
import type { RawSample } from "../sample.ts";
import { resolvePath, type Storage } from "../storage/storage.ts";

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
		else throw new UserError(`${path} is not a prepared data set: run \`mimo data prepare ${path}\` first.`);
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
			this.#try(path, String(index), () => decodeParts(reader.read(index), { images: this.images }));
		}
	}

	#folder(path: string): void {
		const counts = readShardCounts(this.storage, path);
		const config = readDatasetConfig(this.storage, path, null);
		const { splits, path: splitPath } = readSplits(this.storage, path, null);
		for (const [part, patterns] of splits.parts) {
			const unknown = patterns.flatMap(expandBraces).filter((name) => !counts.has(name));
			for (const name of unknown) {
				this.#report(splitPath, null, `the part ${part} names the shard ${name}, which was not prepared`);
			}
		}
		for (const [name, count] of counts) {
			const shard = { name, path: resolvePath(path, name), count };
			this.#shards++;
			this.#structure(shard);
			this.#contents(path, shard, config);
		}
	}

	/** The tar as it is against its index and count. */
	#structure({ name, path, count }: Shard): void {
		try {
			const file = this.storage.open(path);
			const { offsets, samples, cutOff } = indexShard(file);
			file.close();
			if (cutOff !== null) this.#report(name, null, `the tar ends early: ${cutOff}`);
			if (samples.length !== count) {
				this.#report(name, null, `the tar has ${samples.length} samples, .info.json says ${count}`);
			}
			const index = OffsetIndex.open(this.storage, tarIndexName(path));
			const entries = Array.from({ length: index.length }, (_, i) => index.at(i));
			if (index.trailingBytes > 0) this.#report(name, null, `the index has ${index.trailingBytes} bytes too many`);
			index.close();
			const at = offsets.findIndex((offset, i) => entries[i] !== offset);
			if (entries.length !== offsets.length) {
				this.#report(name, null, `the index has ${entries.length} entries, the tar needs ${offsets.length}`);
			} else if (at >= 0) {
				this.#report(name, null, `the index has ${entries[at]} as entry ${at}, the tar has ${offsets[at]}`);
			}
			for (const { key } of samples) {
				const other = this.#keys.get(key);
				if (other !== undefined) this.#report(name, null, `the key ${key} is in ${other} too`);
				this.#keys.set(key, name);
			}
		} catch (error) {
			this.#report(name, null, error);
		}
	}

	#contents(folder: string, shard: Shard, config: DatasetConfig): void {
		const part = { shards: [shard], excludes: new Set<string>(), allShards: [shard.name] };
		const reader = new SplitPartReader(this.storage, folder, part, { wanted: null, openShards: 1 });
		for (let index = 0; index < shard.count; index++) {
			this.#samples++;
			let raw: RawSample | null = null;
			this.#try(shard.name, `sample ${index}`, () => {
				raw = reader.read(index);
			});
			if (raw === null) continue;
			const found: RawSample = raw;
			const record = { restoreKey: ["Webdataset", index], data: [found] };
			this.#try(shard.name, found.key, () => loadSample(found, record, config, {}, { images: this.images }));
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
