/** Auxiliary data (docs/spec/energon.md §1.7): files by name, in a folder or among the parts of a prepared data set. */
import { Database } from "bun:sqlite";
import { UserError } from "../../../system/errors.ts";
import { readWholeFile } from "../../../system/input-file.ts";
import { isUrl, nameOf, type RandomAccessFile, resolvePath, type Storage } from "../storage/storage.ts";
import { INDEX_SQLITE, META_FOLDER, splitMemberName } from "./names.ts";
import { LARGEST_SAMPLE } from "./tar.ts";
import { readShardCounts } from "./webdataset.ts";

/** Location of auxiliary data. */
export interface AuxReference {
	readonly kind: "folder" | "dataset";
	readonly path: string;
}

export interface FileStore {
	/** Name in the metadataset. */
	readonly name: string;
	/** Bytes of a file; null: the store has no file of this name. */
	read(name: string): Uint8Array | null;
}

const protocol = /^([a-z][a-z0-9+.-]*):\/\/(.*)$/is;

/** `filesystem://PATH` is a folder of files, anything else a prepared data set; both relative to the folder `base`. */
export function parseAux(text: string, base: string, where: string): AuxReference {
	const [, scheme, rest] = protocol.exec(text) ?? [];
	if (scheme?.toLowerCase() === "filesystem") return { kind: "folder", path: resolvePath(base, rest!) };
	if (scheme?.toLowerCase().includes("msc")) {
		throw new UserError(`${where} is ${text}: the multi-storage client is not built yet; filesystem:// and paths are.`);
	}
	return { kind: "dataset", path: resolvePath(base, text) };
}

/** Throws a UserError when the folder or data set does not exist. */
export function openFileStore(storage: Storage, name: string, { kind, path }: AuxReference): FileStore {
	if (kind === "folder") {
		if (!isUrl(path) && !storage.isFolder(path)) throw new UserError(`aux ${name}: the folder ${path} does not exist.`);
		return { name, read: (file) => readBelow(storage, path, file) };
	}
	const index = resolvePath(path, `${META_FOLDER}/${INDEX_SQLITE}`);
	if (isUrl(path))
		throw new UserError(
			`aux ${name}: ${path} is a URL, but auxiliary data sets have to be local, because their index by key is read as a file.`,
		);
	if (!storage.isFile(index)) {
		throw new UserError(`aux ${name}: ${path} is not prepared: run \`mimo data prepare ${path}\` first.`);
	}
	return new DatasetStore(name, storage, path, index);
}

function readBelow(storage: Storage, folder: string, name: string): Uint8Array | null {
	const path = resolvePath(folder, name);
	// Names in records must not lead outside the folder.
	if (path !== folder && !path.startsWith(folder.endsWith("/") ? folder : `${folder}/`)) return null;
	if (name.includes("\0") || !storage.isFile(path)) return null;
	if (!isUrl(path)) return readWholeFile(path, LARGEST_SAMPLE);
	const file = storage.open(path);
	try {
		return file.read(0, Math.min(file.size, LARGEST_SAMPLE)).slice();
	} finally {
		file.close();
	}
}

type PartRow = { readonly tar_file_id: number; readonly offset: number; readonly size: number };

/** Parts of samples by "key.extension", located by `index.sqlite`. */
class DatasetStore implements FileStore {
	readonly #shards: readonly string[];
	readonly #database: Database;
	readonly #query: ReturnType<Database["query"]>;
	#open: { readonly shard: number; readonly file: RandomAccessFile } | null = null;

	constructor(
		readonly name: string,
		private readonly storage: Storage,
		private readonly folder: string,
		index: string,
	) {
		this.#shards = [...readShardCounts(storage, folder).keys()];
		try {
			this.#database = new Database(index, { readonly: true });
			this.#query = this.#database.query(
				"SELECT s.tar_file_id, p.content_byte_offset AS offset, p.content_byte_size AS size FROM samples s JOIN sample_parts p ON p.tar_file_id = s.tar_file_id AND p.sample_index = s.sample_index WHERE s.sample_key = ? AND p.part_name = ?",
			);
		} catch (error) {
			throw new UserError(`aux ${name}: ${index} cannot be read: ${(error as Error).message}.`);
		}
	}

	read(name: string): Uint8Array | null {
		const member = splitMemberName(name);
		const found = member === null ? null : (this.#query.get(member.base, member.extension) as PartRow | null);
		if (found === null) return null;
		const { tar_file_id: shard, offset, size } = found;
		const shardName = this.#shards[shard];
		if (shardName === undefined || !(size <= LARGEST_SAMPLE)) {
			throw new UserError(`aux ${this.name}: the index of ${nameOf(this.folder)} is damaged at ${name}.`);
		}
		if (this.#open?.shard !== shard) {
			this.#open?.file.close();
			this.#open = { shard, file: this.storage.open(resolvePath(this.folder, shardName)) };
		}
		const bytes = this.#open.file.read(offset, size);
		if (bytes.length !== size) throw new UserError(`aux ${this.name}: ${shardName} ends within ${name}.`);
		return bytes.slice();
	}
}
