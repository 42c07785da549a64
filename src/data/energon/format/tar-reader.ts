/** Reads single samples of the shards of a split part by index (docs/spec/energon.md §1.2). */
import { shownAddress } from "../../../system/addresses.ts";
import { watched } from "../../../system/read-watch.ts";
import { BrokenSampleError, DamagedIndexError, FatalSampleError } from "../errors.ts";
import type { RawSample } from "../sample.ts";
import { broughtIn } from "../storage/local.ts";
import { isUrl, type RandomAccessFile, type Storage } from "../storage/storage.ts";
import type { SampleReader } from "../wrappers/sample-loader.ts";
import { splitMemberName, tarIndexName } from "./names.ts";
import { OffsetIndex } from "./offset-index.ts";
import { memberContent, readMember, TarError } from "./tar.ts";
import type { SplitPart } from "./webdataset.ts";

/** Bytes of the largest sample, with all its parts and their headers. */
export const LARGEST_SAMPLE = 2 ** 30;
/** The limit, for messages. */
const sampleLimit = `a sample has at most ${LARGEST_SAMPLE}`;

/** Whether to read the part with an extension. */
export type PartFilter = (extension: string) => boolean;

/** Bytes of a sample in a shard, its index for messages, the parts to read, and whether to read a sample "shard/key". */
type SampleRange = readonly [
	offset: number,
	length: number,
	index: number | string,
	wanted: PartFilter | null,
	accept: (name: string) => boolean,
];

/** Keeps the `size` most recently opened files open. */
class OpenFiles<File extends { close(): void }> {
	readonly #open = new Map<string, File>();

	constructor(
		private readonly size: number,
		private readonly openFile: (path: string) => File,
	) {}

	get(path: string): File {
		let file = this.#open.get(path);
		if (file === undefined) {
			file = this.openFile(path);
			this.#open.set(path, file);
			for (const [oldest, stale] of this.#open) {
				if (this.#open.size <= this.size) break;
				stale.close();
				this.#open.delete(oldest);
			}
		}
		return file;
	}
}

/** Opens shards and reads samples from byte ranges. */
export class TarFiles {
	readonly #files: OpenFiles<RandomAccessFile>;
	/** For the sources of samples. */
	readonly datasetPath: string;

	constructor(
		storage: Storage,
		/** Of the data set. */
		folder: string,
		/** Number of shards that are open at once. */
		openShards: number,
	) {
		this.datasetPath = shownAddress(folder);
		this.#files = new OpenFiles(Math.max(1, openShards), (path) => storage.open(path));
	}

	/**
	 * The sample in bytes [offset, offset + length) of a shard; null if `accept` refuses its "shard/key". Throws a
	 * BrokenSampleError if the range does not hold exactly one sample.
	 */
	sample(shard: { readonly name: string; readonly path: string }, ...range: SampleRange): RawSample | null {
		// A shard on a server is fetched by another thread, which looks at the time itself.
		if (isUrl(shard.path)) return this.#sample(shard, ...range);
		return watched(shard.path, () => this.#sample(shard, ...range));
	}

	#sample(
		shard: { readonly name: string; readonly path: string },
		...[offset, length, index, wanted, accept]: SampleRange
	): RawSample | null {
		const broken = (sentence: string, key: string | null = null) =>
			new BrokenSampleError(
				sentence,
				{ datasetPath: this.datasetPath, index, shardName: shard.name, fileNames: [] },
				key,
			);
		// A shard that cannot be opened ends the run, because its samples may be intact.
		const file = this.#files.get(shard.path);
		if (length > LARGEST_SAMPLE) throw broken(`${shard.path}: sample ${index} has ${length} bytes; ${sampleLimit}.`);
		let bytes = file.read(offset, length, { lazily: true });
		let key: string | null = null;
		const parts = new Map<string, Uint8Array>();
		const fileNames: string[] = [];
		// Where the range ends within the last member, the size in the member's header decides.
		const reading = <Result>(read: () => Result): Result => {
			try {
				return read();
			} catch (error) {
				const needed = error instanceof TarError ? error.needed : null;
				const more = needed !== null && needed > bytes.length && needed <= LARGEST_SAMPLE;
				if (!more || offset + needed > file.size) throw error;
				bytes = file.read(offset, needed, { lazily: true });
				return reading(read);
			}
		};
		try {
			for (let at = 0; at < length; ) {
				const member = reading(() => readMember(bytes, at));
				if (member === null) throw new TarError("the archive ends inside the sample");
				at = member.end;
				const name = member.isFile ? splitMemberName(member.name) : null;
				if (name === null) continue;
				if (key === null) {
					key = name.base;
					if (!accept(`${shard.name}/${key}`)) return null;
				} else if (key !== name.base) {
					throw new TarError(`it holds two samples, ${key} and ${name.base}`);
				}
				if (wanted !== null && !wanted(name.extension)) continue;
				parts.set(name.extension, broughtIn(reading(() => memberContent(bytes, member))));
				fileNames.push(member.name);
			}
		} catch (error) {
			if (!(error instanceof TarError)) throw error;
			throw broken(
				`${shard.path} is broken at sample ${index}${key === null ? "" : ` (${key})`}, bytes ${offset} to ${offset + length}: ${error.message}. Run \`mimo data lint\`, or exclude the shard or sample in split.yaml.`,
				key,
			);
		}
		if (key === null) {
			throw broken(
				`${shard.path} has no sample ${index}: bytes ${offset} to ${offset + length} hold no file. Prepare the data set again.`,
			);
		}
		const sources = [{ datasetPath: this.datasetPath, index, shardName: shard.name, fileNames }];
		return { key, shard: shard.name, sources, parts };
	}
}

/** Byte range of sample `local` of a shard. */
function rangeOf(offsets: OffsetIndex, local: number): [number, number] {
	// The first sample's range begins with the file; members of no sample before it are skipped.
	const offset = local === 0 ? 0 : offsets.at(local);
	const end = local + 1 < offsets.length ? offsets.at(local + 1) : offset;
	if (end < offset) throw new DamagedIndexError(`${offsets.path}: entry ${local + 1} is below entry ${local}.`);
	return [offset, end];
}

/** Samples of a split part by index. */
export class SplitPartReader implements SampleReader {
	readonly #files: TarFiles;
	readonly #indexes: OpenFiles<OffsetIndex>;
	readonly #part: SplitPart;
	readonly #wanted: PartFilter | null;
	/** First sample index of every shard, and the total. */
	readonly #starts: number[] = [0];
	/** Shard of the last read, which is tried first because reads are mostly sequential. */
	#current = 0;

	constructor(
		storage: Storage,
		folder: string,
		part: SplitPart,
		options: { readonly wanted: PartFilter | null; readonly openShards: number },
	) {
		this.#part = part;
		this.#wanted = options.wanted;
		this.#files = new TarFiles(storage, folder, options.openShards);
		this.#indexes = new OpenFiles(Math.max(1, options.openShards), (path) => OffsetIndex.open(storage, path));
		for (const { count } of part.shards) this.#starts.push(this.#starts[this.#starts.length - 1]! + count);
	}

	read(index: number): RawSample | null {
		const shardIndex = this.#shardOf(index);
		const shard = this.#part.shards[shardIndex]!;
		const local = index - this.#starts[shardIndex]!;
		const broken = (sentence: string) =>
			new BrokenSampleError(sentence, {
				datasetPath: this.#files.datasetPath,
				index,
				shardName: shard.name,
				fileNames: [],
			});
		const offsets = this.#indexes.get(tarIndexName(shard.path));
		let range: [number, number];
		try {
			range = rangeOf(offsets, local);
		} catch (error) {
			throw error instanceof DamagedIndexError ? broken(error.message) : error;
		}
		const [offset, end] = range;
		return this.#files.sample(
			shard,
			offset,
			end - offset,
			index,
			this.#wanted,
			(name) => !this.#part.excludes.has(name),
		);
	}

	#shardOf(index: number): number {
		const starts = this.#starts;
		const holds = (shard: number) => index >= starts[shard]! && index < starts[shard + 1]!;
		if (holds(this.#current)) return this.#current;
		let low = 0;
		let high = starts.length - 1;
		while (low < high) {
			const middle = (low + high) >> 1;
			if (starts[middle + 1]! <= index) low = middle + 1;
			else high = middle;
		}
		if (low >= starts.length - 1 || !holds(low)) {
			throw new FatalSampleError(`There is no sample ${index}; the split part has ${starts[starts.length - 1]}.`);
		}
		this.#current = low;
		return low;
	}
}
