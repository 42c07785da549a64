/**
 * Checks a whole data set: compares tars with their indexes, decodes every sample, and reads it as a conversation. Each problem
 * is reported with its shard, file or sample.
 */
import { counted } from "../../../system/counted.ts";
import { conversationOf, faultOf } from "../../vision-language/conversation.ts";
import { crudeSample, loadSample } from "../dataset.ts";
import { BrokenSampleError, SampleError, unprepared } from "../errors.ts";
import { type DatasetConfig, readDatasetConfig } from "../format/dataset-config.ts";
import { type FileStore, openFileStore } from "../format/file-store.ts";
import { flatten, type Leaf } from "../format/flatten.ts";
import { IndexedReader } from "../format/indexed.ts";
import { type KeyRow, keyRows } from "../format/join-index.ts";
import { JsonlReader, OffsetIndex } from "../format/jsonl.ts";
import { type ImageDecoder, mediaOfRecord, withAux } from "../format/media.ts";
import { readMetadataset } from "../format/metadataset.ts";
import { INDEX_SQLITE, META_FOLDER, tarIndexName } from "../format/names.ts";
import { SplitPartReader } from "../format/tar.ts";
import { datasetKind, expandAll, readShardCounts, readSplits, type Shard } from "../format/webdataset.ts";
import { type IndexedSample, indexShard } from "../prepare/shard-index.ts";
import type { RawSample, Sample } from "../sample.ts";
import { isUrl, resolvePath, type Storage } from "../storage/storage.ts";

export interface Problem {
	/** Shard or file. */
	readonly where: string;
	/** Key of the sample, for a problem of a sample. */
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

export interface LintOptions {
	/** Decodes an image for conversations, as `inspectImage` does. */
	readonly images: ImageDecoder;
	/** A further check, which returns a sample's problem or null; null: no further check. */
	readonly check: ((sample: Sample) => string | null) | null;
}

/** Checks a folder, a JSONL file, or all data sets of a metadataset. `report` is called for every problem. */
export function lint(
	storage: Storage,
	path: string,
	options: LintOptions,
	report: (problem: Problem) => void,
): LintResult {
	const linter = new Linter(storage, options, report);
	linter.dataset(path, { aux: new Map(), isWhole: true });
	return linter.result;
}

const noPrompts = { caption: "", ocr: "", classification: "" };

/** How a data set is used. */
interface Use {
	readonly aux: Leaf["aux"];
	/** False: the samples are joined with others, so they need not be conversations by themselves. */
	readonly isWhole: boolean;
}

class Linter {
	#shards = 0;
	#samples = 0;
	#bad = 0;
	#problems = 0;
	/** Auxiliary data of the current data set; null: its samples are joined with others. */
	#stores: readonly FileStore[] | null = [];
	/** Shard of every key of the current data set, where keys have to be unique. */
	readonly #keys = new Map<string, string>();

	constructor(
		private readonly storage: Storage,
		private readonly options: LintOptions,
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

	dataset(path: string, { aux, isWhole }: Use): void {
		const kind = datasetKind(this.storage, path);
		const stores = [...aux].map(([name, reference]) => openFileStore(this.storage, name, reference));
		this.#stores = isWhole ? stores : null;
		if (kind === "jsonl") this.#jsonl(path);
		else if (kind === "indexed") this.#indexed(path);
		else if (kind === "webdataset") this.#folder(path);
		else if (kind === "metadataset") this.#metadataset(path);
		else throw unprepared(path);
	}

	#metadataset(path: string): void {
		const metadataset = readMetadataset(this.storage, path);
		const paths = new Map<string, Use>();
		for (const part of metadataset.splits.keys()) {
			const inherited = { splitPart: part, subflavors: {}, multiplier: 1, subset: null };
			for (const { source, aux } of flatten(metadataset, inherited).leaves) {
				if (source.kind === "dataset") paths.set(source.path, { aux, isWhole: true });
				else for (const { path: joined } of source.join.parts) paths.set(joined, { aux, isWhole: false });
			}
		}
		for (const [inner, use] of paths) {
			this.#keys.clear();
			this.dataset(inner, use);
		}
	}

	#indexed(path: string): void {
		const reader = new IndexedReader(path, null);
		this.#shards++;
		for (let index = 0; index < reader.length; index++) {
			this.#samples++;
			this.#try(path, String(index), () => {
				reader.read(index);
			});
		}
	}

	#jsonl(path: string): void {
		const reader = new JsonlReader(this.storage, path);
		this.#shards++;
		for (let index = 0; index < reader.length; index++) {
			this.#samples++;
			this.#try(path, String(index), () => {
				const raw = reader.read(index);
				const record = { restoreKey: ["Webdataset", index], data: [raw] };
				const sample = crudeSample(raw, record, {}, this.options);
				const media = mediaOfRecord(sample.fields.json, path, (this.#stores?.length ?? 0) > 0);
				if (media !== null) throw new SampleError(`Record ${index} cannot be trained on: ${media}.`);
				this.#sample(sample);
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

	/** Compares a tar with its index and sample count. Returns its samples, or null if it cannot be read. */
	#structure({ name, path, count }: Shard): readonly IndexedSample[] | null {
		try {
			const file = this.storage.open(path);
			const { offsets, samples, cutOff } = indexShard(file);
			file.close();
			if (cutOff !== null) this.#report(name, null, `the tar ends early: ${cutOff}`);
			if (samples.length !== count) {
				this.#report(name, null, `the tar has ${counted(samples.length, "sample")}, .info.json says ${count}`);
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

	/** Compares the index of a tar with the tar. */
	#offsets(name: string, path: string, offsets: readonly number[]): void {
		const index = OffsetIndex.open(this.storage, tarIndexName(path));
		try {
			if (index.trailingBytes > 0) this.#report(name, null, `the index has ${index.trailingBytes} bytes too many`);
			if (index.length !== offsets.length) {
				this.#report(
					name,
					null,
					`the index has ${counted(index.length, "entry", "entries")}, the tar needs ${offsets.length}`,
				);
				return;
			}
			const at = offsets.findIndex((offset, i) => index.at(i) !== offset);
			if (at < 0) return;
			this.#report(name, null, `the index has ${index.at(at)} as entry ${at}, the tar has ${offsets[at]}`);
		} finally {
			index.close();
		}
	}

	/** The index by key of a local folder; null if it does not exist, since only joins need it. */
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
				// A missing or damaged file of the shard was already reported; samples beyond its index do not exist.
				if (!(error instanceof BrokenSampleError)) return;
				if (index > 0 && index >= this.#entries(shard)) return;
				this.#report(shard.name, `sample ${index}`, error);
			}
			this.#samples++;
			if (raw === null) continue;
			const found: RawSample = raw;
			const record = { restoreKey: ["Webdataset", index], data: [found] };
			this.#try(shard.name, found.key, () => {
				this.#sample(loadSample(found, record, config, {}, this.options));
			});
		}
	}

	/** Throws a SampleError for a sample that training would skip. */
	#sample(loaded: Sample): void {
		if (this.#stores === null) return;
		const sample = withAux(loaded, this.#stores, this.options);
		const refuse = (what: string) => new SampleError(`Sample ${sample.key} cannot be trained on: ${what}.`, sample.key);
		const fault = faultOf(conversationOf(sample, noPrompts));
		if (fault !== null) throw refuse(fault);
		const more = this.options.check?.(sample) ?? null;
		if (more !== null) throw new SampleError(`Sample ${sample.key}: ${more}.`, sample.key);
	}

	/** Number of samples in the index of a shard. */
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

/** Compares an index by key with the shards in order, and reports the first difference. */
class KeyIndexCheck {
	readonly #rows: Generator<KeyRow, void, void>;
	#next: KeyRow | null = null;
	/** Whether a difference was reported; further rows are not compared, since they would differ too. */
	#over = false;

	constructor(
		path: string,
		private readonly report: (what: string) => void,
	) {
		this.#rows = keyRows(path);
		this.#advance();
	}

	#advance(): void {
		try {
			const step = this.#rows.next();
			this.#next = step.done ? null : step.value;
		} catch (error) {
			this.#differs((error as Error).message);
		}
	}

	#differs(what: string): void {
		this.#over = true;
		this.#next = null;
		this.report(what);
	}

	/** Compares shard `number` of `.info.json` with the index. `samples` null: the samples are unknown. */
	compare(number: number, name: string, samples: readonly IndexedSample[] | null): void {
		if (samples === null) {
			while (this.#next !== null && this.#next.shard <= number) this.#advance();
			return;
		}
		for (const { key, offset, size } of samples) {
			if (this.#over) return;
			const row = this.#next;
			if (row?.shard !== number || row.key !== key || row.offset !== offset || row.size !== size) {
				this.#differs(`the index by key differs from the tar at ${name}/${key}`);
				return;
			}
			this.#advance();
		}
	}

	/** Ends the comparison after `shards` shards: the index may not have further rows. */
	end(shards: number): void {
		if (this.#next !== null && this.#next.shard < shards) {
			this.#differs(`the index by key has the sample ${this.#next.key}, which is in no shard`);
		}
		this.#rows.return();
	}
}
