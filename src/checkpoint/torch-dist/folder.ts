/**
 * Reads a torch_dist checkpoint of Megatron (PyTorch Distributed Checkpoint, docs/spec/checkpoint.md §1): ranges of its tensors,
 * under the keys on disk, and its byte items. Files that .metadata does not name are ignored.
 */
import { existsSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { crc32 } from "node:zlib";
import { UserError } from "../../system/errors.ts";
import { InputFile, readWholeFile } from "../../system/input-file.ts";
import { fileError } from "../../system/system-errors.ts";
import { CheckedChunks, readBox } from "../chunks.ts";
import { dtypes, elementCount } from "../dtype.ts";
import { FilePool } from "../files.ts";
import { stateGlobals, tensorGlobals } from "../pickle/allowed.ts";
import { isContiguous, TorchArchive, ZipArchive } from "../pickle/archive.ts";
import { TensorReference } from "../pickle/values.ts";
import { type TensorStore, typeOf } from "../store.ts";
import { type Catalog, parseMetadata, type StoredChunk, type StoredItem, type StoredTensor } from "./metadata.ts";

export const tracker = "latest_checkpointed_iteration.txt";

/** Bytes of the largest pickle of a tensor, which has some two hundred bytes. */
const LARGEST_TENSOR_PICKLE = 2 ** 20;
/** Bytes of the largest .metadata, enough for 180,000 chunks, which take some 300 bytes and 45 values each. */
const LARGEST_METADATA = 2 ** 27;
/** Bytes of the largest tracker, which holds a number or a word. */
const LARGEST_TRACKER = 1024;

/** Position of a chunk's values, and their checksum (0: no checksum of exactly these values is stored). */
interface Location {
	readonly position: number;
	readonly size: number;
	readonly crc: number;
}

export class TorchDistFolder implements TensorStore {
	readonly #files: FilePool<InputFile>;
	readonly #locations = new Map<StoredChunk, Location>();
	readonly #checks = new CheckedChunks<StoredChunk>();

	private constructor(
		/** The iteration's folder. */
		readonly path: string,
		readonly catalog: Catalog,
		/** A message for the user, or null. */
		readonly notice: string | null,
	) {
		this.#files = new FilePool((name) => InputFile.open(join(path, name), { followLinks: false }));
	}

	get tensors(): ReadonlyMap<string, StoredTensor> {
		return this.catalog.tensors;
	}

	get objects(): ReadonlyMap<string, StoredItem> {
		return this.catalog.objects;
	}

	/** Opens the folder of an iteration, or a root folder, whose tracker names the iteration. */
	static open(path: string): TorchDistFolder {
		const { folder, notice } = resolveIteration(path);
		const index = join(folder, ".metadata");
		if (!existsSync(index)) {
			const legacy = existsSync(join(folder, "mp_rank_00")) || existsSync(join(folder, "mp_rank_00_000"));
			throw new UserError(
				legacy
					? `${folder} is a checkpoint of Megatron's old format (mp_rank_…), which is not supported.`
					: `${folder} is not a torch_dist checkpoint: it has no .metadata.`,
			);
		}
		const catalog = parseMetadata(readWholeFile(index, LARGEST_METADATA, { inside: folder }), index);
		const opened = new TorchDistFolder(folder, catalog, notice);
		try {
			opened.#checkFiles();
		} catch (error) {
			opened[Symbol.dispose]();
			throw error;
		}
		return opened;
	}

	/** Checks that every item lies inside its file. */
	#checkFiles(): void {
		const ends = new Map<string, number>();
		const items = [...[...this.tensors.values()].flatMap(({ chunks }) => chunks), ...this.objects.values()];
		for (const { file, position, length } of items) {
			ends.set(file, Math.max(ends.get(file) ?? 0, position + length));
		}
		for (const [file, end] of ends) {
			const { size, path } = this.#files.get(file);
			if (size < end) throw new UserError(`${path} is truncated: it has ${size} bytes, and .metadata names ${end}.`);
		}
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const { dtype, shape, chunks } = typeOf(this, name) as StoredTensor;
		const bytes = dtypes[dtype].bits / 8;
		for (const chunk of chunks) {
			readBox(shape, bytes, chunk, offset, into, (position, part) => this.#read(name, chunk, position, part));
		}
	}

	/** Bytes of one chunk, its checksum verified first. */
	#read(name: string, chunk: StoredChunk, position: number, into: Uint8Array): void {
		let location = this.#locations.get(chunk);
		if (!location) {
			location = this.#locate(name, chunk);
			this.#locations.set(chunk, location);
			if (location.crc === 0) this.#checks.trust(chunk);
		}
		const { position: begin, size, crc } = location;
		this.#checks.read(
			chunk,
			position,
			into,
			() => {
				const file = this.#files.get(chunk.file);
				return { size, readInto: (at, part) => file.readInto(begin + at, part) };
			},
			() => {
				let sum = 0;
				return {
					update: (bytes) => {
						sum = crc32(bytes, sum);
					},
					finish: () => {
						if (sum === crc) return;
						throw new UserError(`${join(this.path, chunk.file)}: tensor ${name} is damaged (its checksum differs).`);
					},
				};
			},
		);
	}

	/** Opens the chunk's archive and checks its tensor against .metadata. */
	#locate(name: string, chunk: StoredChunk): Location {
		const archive = this.#archive(chunk, name);
		const where = archive.zip.where;
		const reference = archive.load(tensorGlobals, LARGEST_TENSOR_PICKLE);
		if (!(reference instanceof TensorReference)) throw new UserError(`${where} holds no tensor.`);
		const { dtype } = typeOf(this, name);
		if (reference.dtype !== dtype || reference.shape.join() !== chunk.sizes.join()) {
			throw new UserError(
				`${where} holds [${reference.shape}] ${reference.dtype}, and .metadata says [${chunk.sizes}] ${dtype}.`,
			);
		}
		const record = archive.locate(reference.storage);
		const bytes = dtypes[dtype].bits / 8;
		const size = elementCount(chunk.sizes)! * bytes;
		if (!isContiguous(reference.shape, reference.strides)) {
			throw new UserError(`${where} holds a tensor that is not contiguous, which is not supported.`);
		}
		const whole = reference.offset === 0 && size === record.size;
		return {
			position: record.position + reference.offset * bytes,
			size,
			crc: whole ? record.crc : 0,
		};
	}

	#archive({ file, position, length }: StoredItem, name: string): TorchArchive {
		const opened = this.#files.get(file);
		return new TorchArchive(ZipArchive.open(opened, position, length, `${opened.path} (${name})`));
	}

	/** The stored bytes of a byte item: a torch.save archive. */
	readItem(name: string): Uint8Array {
		const item = this.#item(name);
		return this.#files.get(item.file).read(item.position, item.length);
	}

	/** The object in a byte item; Megatron wraps it in a list of one. */
	readObject(name: string, options: { readonly inert?: readonly string[] } = {}): unknown {
		const value = this.#archive(this.#item(name), name).load(stateGlobals(options.inert));
		return Array.isArray(value) && value.length === 1 ? value[0] : value;
	}

	#item(name: string): StoredItem {
		const item = this.objects.get(name);
		if (!item) throw new UserError(`${this.path} has no object ${name}.`);
		return item;
	}

	[Symbol.dispose](): void {
		this.#files[Symbol.dispose]();
	}
}

/**
 * `path` itself, or the iteration that its tracker names. If that iteration does not exist and there is a single other, the other
 * is read, which `notice` says. Throws a UserError that names the newest of several others.
 */
export function resolveIteration(path: string): { readonly folder: string; readonly notice: string | null } {
	if (!existsSync(path)) throw new UserError(`Cannot open ${path}: it does not exist.`);
	const file = join(path, tracker);
	if (!existsSync(file)) return { folder: path, notice: null };
	const text = new TextDecoder().decode(readWholeFile(file, LARGEST_TRACKER, { inside: path })).trim();
	let others: string[];
	try {
		others = readdirSync(path).filter((name) => /^(iter_[0-9]+|release)$/.test(name));
	} catch (error) {
		throw fileError("open", path, error);
	}
	if (text !== "release" && !/^[0-9]{1,15}$/.test(text)) {
		throw new UserError(`${file} says ${JSON.stringify(text.slice(0, 40))}, which is not an iteration.`);
	}
	const named = text === "release" ? "release" : `iter_${text.padStart(7, "0")}`;
	if (existsSync(join(path, named))) return { folder: join(path, named), notice: null };
	const newest = others.sort().at(-1);
	if (others.length !== 1 || newest === undefined) {
		const hint = newest === undefined ? "there is no other" : `the newest that exists is ${join(path, newest)}`;
		throw new UserError(`${file} names ${named}, which does not exist; ${hint}.`);
	}
	return { folder: join(path, newest), notice: `${file} names ${named}, which does not exist: ${newest} is read.` };
}
