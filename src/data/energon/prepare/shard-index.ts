/** Finds the offsets of a shard's samples and their parts in one pass (docs/spec/energon.md §1.3, §1.4). */
import { Database } from "bun:sqlite";
import { closeSync, openSync, writeSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../../system/errors.ts";
import { splitMemberName } from "../format/names.ts";
import { readMember, TarError, type TarMember } from "../format/tar.ts";
import { LocalFile } from "../storage/open.ts";
import type { RandomAccessFile } from "../storage/storage.ts";

/** Bytes that are read for a header; longer extension headers are read whole. */
const WINDOW = 64 * 1024;

interface IndexedPart {
	readonly extension: string;
	readonly offset: number;
	readonly size: number;
}

export interface IndexedSample {
	readonly key: string;
	/** Offset of the first header block, and bytes up to the next sample or the end. */
	readonly offset: number;
	readonly size: number;
	readonly parts: readonly IndexedPart[];
}

export interface ShardIndex {
	readonly samples: readonly IndexedSample[];
	/** Entries of the `.tar.idx` file. */
	readonly offsets: readonly number[];
	/** Why the shard ends before its end-of-archive block, or null; the samples before are whole. */
	readonly cutOff: string | null;
	/** Whether there is an end-of-archive block. */
	readonly hasEnd: boolean;
}

/** Members of a tar file in order, from the member at byte `from` on. Throws a TarError where the file is damaged. */
export function* walkTar(file: RandomAccessFile, from = 0): Generator<TarMember, void, void> {
	for (let at = from; at < file.size; ) {
		const member = memberAt(file, at);
		if (member === null) return;
		yield member;
		at = member.end;
	}
}

function memberAt(file: RandomAccessFile, at: number): TarMember | null {
	for (let length = WINDOW; ; ) {
		const bytes = file.read(at, length);
		try {
			const member = readMember(bytes, 0);
			if (member === null) return null;
			const { headerOffset, contentOffset, end } = member;
			return { ...member, headerOffset: headerOffset + at, contentOffset: contentOffset + at, end: end + at };
		} catch (error) {
			if (!(error instanceof TarError)) throw error;
			const { needed } = error;
			if (needed === null || needed <= bytes.length || at + needed > file.size) {
				throw new TarError(`of the member at byte ${at}, ${error.message}`, needed);
			}
			length = needed;
		}
	}
}

/**
 * The index of a shard. As in Energon, it ends silently where a header is truncated or missing. Throws a TarError where the
 * content of a member is truncated.
 */
export function indexShard(file: RandomAccessFile): ShardIndex {
	const samples: { key: string; offset: number; parts: IndexedPart[] }[] = [];
	let end = 0;
	let cutOff: string | null = null;
	try {
		for (const member of walkTar(file)) {
			if (member.isFile && member.contentOffset + member.size > file.size) {
				throw new ContentCutOff(`${member.name} is cut off at the end of the file`);
			}
			end = member.end;
			const name = member.isFile ? splitMemberName(member.name) : null;
			if (name === null) continue;
			if (samples.length === 0 || samples[samples.length - 1]!.key !== name.base) {
				samples.push({ key: name.base, offset: member.headerOffset, parts: [] });
			}
			const part = { extension: name.extension, offset: member.contentOffset, size: member.size };
			samples[samples.length - 1]!.parts.push(part);
		}
	} catch (error) {
		if (!(error instanceof TarError) || error instanceof ContentCutOff) throw error;
		cutOff = error.message;
	}
	const offsets = [...samples.map(({ offset }) => offset), end];
	return {
		samples: samples.map((sample, i) => ({ ...sample, size: offsets[i + 1]! - sample.offset })),
		offsets,
		cutOff,
		hasEnd: end < file.size,
	};
}

class ContentCutOff extends TarError {}

// Writes `index.sqlite`: samples and parts by key (docs/spec/energon.md §1.4).

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

/*
 * Makes sample keys distinct by rewriting the headers of shards in place: every member moves into a folder with the shard's
 * name (docs/spec/energon.md §1.2). The shards are changed only if every header has room for the longer name.
 */

const NAME_BYTES = 100;

interface Rename {
	readonly offset: number;
	readonly header: Uint8Array;
}

/** Renames the members of all shards if two samples have the same key. */
export function prefixMembers(folder: string, names: readonly string[], report: (line: string) => void): void {
	const keys = new Set<string>();
	let duplicates = 0;
	const renames = new Map<string, Rename[]>();
	for (const name of names) {
		const { renamed, own } = planShard(folder, name);
		renames.set(name, renamed);
		for (const key of own) {
			if (keys.has(key)) duplicates++;
			keys.add(key);
		}
	}
	if (duplicates === 0) {
		report("all sample keys are distinct");
		return;
	}
	for (const [name, renamed] of renames) {
		const descriptor = openSync(join(folder, name), "r+");
		try {
			for (const { offset, header } of renamed) writeSync(descriptor, header, 0, header.length, offset);
		} finally {
			closeSync(descriptor);
		}
	}
	report(
		`${duplicates} sample keys were not distinct; the files of every shard are now in a folder with the shard's name`,
	);
}

function planShard(folder: string, name: string): { renamed: Rename[]; own: string[] } {
	const path = join(folder, name);
	const file = LocalFile.open(path);
	const renamed: Rename[] = [];
	const own: string[] = [];
	try {
		for (const member of walkTar(file)) {
			const parts = member.isFile ? splitMemberName(member.name) : null;
			if (parts !== null && parts.base !== own[own.length - 1]) own.push(parts.base);
			if (!member.isFile) continue;
			const longer = `${name.replace(/\.tar$/, "")}/${member.name}`;
			if (member.contentOffset - member.headerOffset !== 512 || Buffer.byteLength(longer) > NAME_BYTES) {
				throw new UserError(
					`${path}: ${member.name} cannot be renamed in place; write the shard again with distinct keys.`,
				);
			}
			renamed.push({ offset: member.headerOffset, header: renameHeader(file.read(member.headerOffset, 512), longer) });
		}
	} catch (error) {
		if (error instanceof TarError) throw new UserError(`${path} is damaged: ${error.message}.`);
		throw error;
	} finally {
		file.close();
	}
	return { renamed, own };
}

function renameHeader(header: Uint8Array, name: string): Uint8Array {
	const changed = Uint8Array.from(header);
	changed.fill(0, 0, NAME_BYTES);
	changed.set(new TextEncoder().encode(name), 0);
	// The prefix field of a POSIX header is cleared, because the new name is whole.
	if (new TextDecoder().decode(changed.subarray(257, 263)) === "ustar\0") changed.fill(0, 345, 500);
	changed.fill(0x20, 148, 156);
	const sum = changed.reduce((total, byte) => total + byte, 0);
	changed.set(new TextEncoder().encode(`${sum.toString(8).padStart(6, "0")}\0 `), 148);
	return changed;
}
