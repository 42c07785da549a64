/** Writes `index.sqlite`: samples and parts by key (docs/spec/energon.md §1.4). */
import { Database } from "bun:sqlite";
import { UserError } from "../../../system/errors.ts";
import type { ShardIndex } from "./shard-index.ts";

const tables = [
	"CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER)",
	"CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, content_byte_size INTEGER)",
];

const indexes = [
	"CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)",
	"CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset)",
	"CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)",
];

/** Writes the index of a dataset, shard by shard. */
export class SqliteIndexWriter implements Disposable {
	readonly #database: Database;
	readonly #sample: ReturnType<Database["prepare"]>;
	readonly #part: ReturnType<Database["prepare"]>;

	constructor(path: string) {
		this.#database = new Database(path, { create: true });
		// An unfinished file is removed, so it needs no journal.
		this.#database.run("PRAGMA journal_mode = OFF");
		this.#database.run("PRAGMA synchronous = OFF");
		for (const table of tables) this.#database.run(table);
		this.#sample = this.#database.prepare("INSERT INTO samples VALUES (?, ?, ?, ?, ?)");
		this.#part = this.#database.prepare("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)");
	}

	/** Adds the rows of a shard. Throws a UserError for a sample key that the index already has. */
	add(shardNumber: number, shardName: string, { samples }: ShardIndex): void {
		this.#database.run("BEGIN");
		for (const [i, { key, offset, size, parts }] of samples.entries()) {
			try {
				this.#sample.run(shardNumber, key, i, offset, size);
			} catch (error) {
				if (!/UNIQUE/.test((error as Error).message)) throw error;
				throw new UserError(
					`The sample key "${key}" of ${shardName} is not unique, which Energon requires: run again with --fix-duplicates, which moves the files of every shard into a folder with the shard's name.`,
				);
			}
			for (const part of parts) this.#part.run(shardNumber, i, part.extension, part.offset, part.size);
		}
		this.#database.run("COMMIT");
	}

	/** Builds the database's indexes, which completes the file. */
	finish(): void {
		for (const index of indexes) this.#database.run(index);
	}

	[Symbol.dispose](): void {
		this.#sample.finalize();
		this.#part.finalize();
		this.#database.close();
	}
}
