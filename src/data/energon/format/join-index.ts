/**
 * Join indexes: the sample of every joined dataset for each row (docs/spec/energon.md §1.5). `mimo data prepare METADATASET`
 * builds them from the datasets' `index.sqlite`; training reads them.
 */
import { Database } from "bun:sqlite";
import { CryptoHasher } from "bun";
import { UserError } from "../../../system/errors.ts";
import { FatalSampleError } from "../errors.ts";
import type { RawSample } from "../sample.ts";
import { nameOf, type RandomAccessFile, resolvePath, type Storage } from "../storage/storage.ts";
import type { SampleReader } from "../wrappers/sample-loader.ts";
import type { Join, NonMatch } from "./metadataset.ts";
import { INDEX_SQLITE, INDEX_UUID, META_FOLDER } from "./names.ts";
import { type PartFilter, TarFiles } from "./tar.ts";
import { readShardCounts, readSplitPart, type SplitPart } from "./webdataset.ts";

const MAGIC = "JIDX0001";
const HEADER_BYTES = 16;

export interface JoinedDataset {
	readonly path: string;
	readonly part: SplitPart;
	readonly nonMatch: NonMatch;
}

/** The datasets of a join with their split parts. */
export function joinedDatasets(storage: Storage, join: Join, splitPart: string): JoinedDataset[] {
	return join.parts.map(({ path, splitPart: own, splitConfig, nonMatch }) => ({
		path,
		nonMatch,
		part: readSplitPart(storage, path, own ?? splitPart, splitConfig),
	}));
}

/** Path of a join's index, beside the metadataset; its name has a hash of everything the index depends on. */
export function joinIndexPath(storage: Storage, join: Join, datasets: readonly JoinedDataset[]): string {
	const hash = new CryptoHasher("sha256");
	for (const { path, part, nonMatch } of datasets) {
		const uuid = storage.readText(resolvePath(path, `${META_FOLDER}/${INDEX_UUID}`));
		hash.update(`\0uuid=${uuid}\0excludes=`);
		// Energon hashes them in the arbitrary order of a Python set, so no order gives its hash.
		for (const exclude of [...part.excludes].sort()) hash.update(`${exclude}\0`);
		hash.update(`\0nonmatch=${nonMatch}\0`);
	}
	return resolvePath(`${join.file}.cache`, `join_index_${hash.digest("hex")}.bin`);
}

/** Rows of a join index. */
export class JoinIndex {
	readonly rows: number;
	readonly columns: number;
	readonly #file: RandomAccessFile;

	constructor(storage: Storage, path: string) {
		this.#file = storage.open(path);
		const header = this.#file.read(0, HEADER_BYTES);
		const magic = new TextDecoder().decode(header.subarray(0, 8));
		if (header.length < HEADER_BYTES || magic !== MAGIC) throw new UserError(`${path} is not a join index.`);
		this.columns = Number(new DataView(header.buffer, header.byteOffset).getBigInt64(8, true));
		if (!(this.columns > 0 && this.columns < 1000)) throw new UserError(`${path} has ${this.columns} columns.`);
		this.rows = Math.floor((this.#file.size - HEADER_BYTES) / (24 * this.columns));
	}

	/** Shard number, byte offset and size of a row's sample in a dataset; null if the dataset lacks the sample. */
	at(row: number, column: number): { shard: number; offset: number; size: number } | null {
		if (row < 0 || row >= this.rows) throw new FatalSampleError(`${this.#file.path} has no row ${row}.`);
		const bytes = this.#file.read(HEADER_BYTES + 24 * (row * this.columns + column), 24);
		const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
		const [shard, offset, size] = [0, 8, 16].map((at) => Number(view.getBigInt64(at, true))) as [
			number,
			number,
			number,
		];
		return shard < 0 ? null : { shard, offset, size };
	}
}

/** Reads the samples of one dataset of a join by row. */
export class JoinReader implements SampleReader {
	readonly #files: TarFiles;

	constructor(
		storage: Storage,
		private readonly index: JoinIndex,
		private readonly column: number,
		private readonly dataset: JoinedDataset,
		private readonly options: { readonly wanted: PartFilter | null; readonly openShards: number },
	) {
		this.#files = new TarFiles(storage, dataset.path, options.openShards);
	}

	read(row: number): RawSample | null {
		const entry = this.index.at(row, this.column);
		if (entry === null) return null;
		const name = this.dataset.part.allShards[entry.shard];
		if (name === undefined) {
			throw new FatalSampleError(`The join index names shard ${entry.shard} of ${this.dataset.path}, which has fewer.`);
		}
		const shard = { name, path: resolvePath(this.dataset.path, name) };
		return this.#files.sample(shard, entry.offset, entry.size, row, this.options.wanted, () => true);
	}
}

/** The bytes of a join index, built from the datasets' sqlite indexes. The datasets have to be local. */
export function buildJoinIndex(storage: Storage, datasets: readonly JoinedDataset[]): Uint8Array {
	const [primary, ...others] = datasets.map((dataset) => new KeyedSamples(storage, dataset));
	const rows: bigint[] = [];
	for (const sample of primary!.inOrder()) {
		const row = [sample.shard, sample.offset, sample.size];
		let skip = false;
		for (const other of others) {
			const match = other.find(sample.key);
			if (match !== undefined) {
				row.push(match.shard, match.offset, match.size);
			} else if (other.dataset.nonMatch === "none") {
				row.push(-1, -1, -1);
			} else if (other.dataset.nonMatch === "skip") {
				skip = true;
			} else {
				throw new UserError(
					`Sample ${sample.key} of ${primary!.dataset.path} is not in ${other.dataset.path}; set nonmatch to skip or none.`,
				);
			}
		}
		if (!skip) rows.push(...row.map(BigInt));
	}
	const bytes = new Uint8Array(HEADER_BYTES + 8 * rows.length);
	new TextEncoder().encodeInto(MAGIC, bytes);
	const view = new DataView(bytes.buffer);
	view.setBigInt64(8, BigInt(datasets.length), true);
	for (const [i, value] of rows.entries()) view.setBigInt64(HEADER_BYTES + 8 * i, value, true);
	return bytes;
}

interface KeyedSample {
	readonly key: string;
	/** Position of the shard in the split part. */
	readonly shard: number;
	readonly offset: number;
	readonly size: number;
}

/** Samples of a split part by key, from `index.sqlite`, without excluded samples. */
class KeyedSamples {
	readonly #byShard: KeyedSample[][];
	readonly #byKey = new Map<string, KeyedSample>();

	constructor(
		storage: Storage,
		readonly dataset: JoinedDataset,
	) {
		const path = resolvePath(dataset.path, `${META_FOLDER}/${INDEX_SQLITE}`);
		if (!storage.isFile(path)) {
			throw new UserError(
				`${path} does not exist; joins need it: run \`mimo data prepare ${nameOf(dataset.path)} --tar-index-only\`.`,
			);
		}
		const names = [...readShardCounts(storage, dataset.path).keys()];
		const position = new Map(dataset.part.allShards.map((name, i) => [name, i]));
		this.#byShard = dataset.part.allShards.map(() => []);
		for (const { shard: file, key, offset, size } of keyRows(path)) {
			const name = names[file];
			const shard = name === undefined ? undefined : position.get(name);
			if (name === undefined || shard === undefined) continue;
			// As in Energon, an excluded shard is left out of a join only if it lies in a subfolder.
			if (dataset.part.excludes.has(name) || dataset.part.excludes.has(`${name}/${key}`)) continue;
			if (this.#byKey.has(key))
				throw new UserError(`${dataset.path} has the sample key ${key} twice, so it cannot be joined.`);
			const sample = { key, shard, offset, size };
			this.#byShard[shard]!.push(sample);
			this.#byKey.set(key, sample);
		}
	}

	*inOrder(): Generator<KeyedSample> {
		for (const samples of this.#byShard) yield* samples;
	}

	find(key: string): KeyedSample | undefined {
		return this.#byKey.get(key);
	}
}

// Reads `index.sqlite`, the location of samples by key (docs/spec/energon.md §1.4), for joins and `mimo data lint`.

export interface KeyRow {
	/** Number of the shard in `.info.json`. */
	readonly shard: number;
	readonly key: string;
	/** Bytes of the sample in the shard. */
	readonly offset: number;
	readonly size: number;
}

type Columns = [shard: unknown, key: unknown, offset: unknown, size: unknown];

/**
 * Why a database may have more rows than its bytes hold; null: it has not. A view or computed column can be endless, and so can a
 * table whose pages refer to each other.
 */
function faultOf(database: Database): string | null {
	const [table] = database.query<{ type: string }, []>("SELECT type FROM pragma_table_list('samples')").all();
	if (table === undefined) return "it has no table samples";
	if (table.type !== "table") return `samples is a ${table.type}, not a table`;
	const computed = database
		.query<{ name: string }, []>("SELECT name FROM pragma_table_xinfo('samples') WHERE hidden <> 0")
		.get();
	if (computed !== null) return `samples has the computed column ${computed.name}`;
	const check = database.query<{ quick_check: string }, []>("PRAGMA quick_check(1)").get()?.quick_check;
	return check === "ok" ? null : (check?.split("\n").at(-1) ?? "it cannot be checked");
}

/** Rows in the order of the shards and their samples. Throws a UserError when the file is not such an index. */
export function* keyRows(path: string): Generator<KeyRow, void, void> {
	const damaged = (what: string) =>
		new UserError(
			`${path} is not an index by key: ${what}; \`mimo data prepare FOLDER --tar-index-only\` rebuilds it.`,
		);
	const asked = <Result>(ask: () => Result): Result => {
		try {
			return ask();
		} catch (error) {
			throw damaged((error as Error).message);
		}
	};
	using database = asked(() => new Database(path, { readonly: true }));
	const fault = asked(() => faultOf(database));
	if (fault !== null) throw damaged(fault);
	const rows = asked(() =>
		database
			.query<Columns, []>(
				"SELECT tar_file_id AS a, sample_key AS b, byte_offset AS c, byte_size AS d FROM samples ORDER BY tar_file_id, sample_index",
			)
			.iterate(),
	);
	for (let number = 0; ; number++) {
		const step = asked(() => rows.next());
		if (step.done) return;
		const [shard, key, offset, size] = Object.values(step.value as unknown as Record<string, unknown>) as Columns;
		const whole = [shard, offset, size].every((value) => Number.isSafeInteger(value) && (value as number) >= 0);
		if (!whole || typeof key !== "string") throw damaged(`row ${number} is damaged`);
		yield { shard: shard as number, key, offset: offset as number, size: size as number };
	}
}
