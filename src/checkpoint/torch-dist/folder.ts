/**
 * A Megatron torch_dist checkpoint (PyTorch Distributed Checkpoint, checkpoint.md §1): its tensors under the keys on
 * disk, read by ranges, and its byte items. Only files that .metadata names count.
 */
import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { crc32 } from "node:zlib";
import { UserError } from "../../native/errors.ts";
import { readBox } from "../chunks.ts";
import { dtypes, elementCount } from "../dtype.ts";
import { FilePool, fileError, InputFile } from "../files.ts";
import { stateGlobals, tensorGlobals } from "../pickle/allowed.ts";
import { isContiguous, TorchArchive } from "../pickle/archive.ts";
import { TensorReference } from "../pickle/values.ts";
import { ZipArchive } from "../pickle/zip.ts";
import { type TensorStore, typeOf } from "../store.ts";
import { type Catalog, parseMetadata, type StoredChunk, type StoredItem, type StoredTensor } from "./metadata.ts";

export const tracker = "latest_checkpointed_iteration.txt";

/** A tensor item's pickle has some two hundred bytes. */
const LARGEST_TENSOR_PICKLE = 2 ** 20;
const LARGEST_METADATA = 2 ** 32;

/** Where a chunk's values lie, and how far their checksum has been followed. */
interface Location {
	readonly position: number;
	readonly size: number;
	readonly crc: number;
	/** Bytes read in order from the start, −1 once the order was left. */
	followed: number;
	sum: number;
}

export class TorchDistFolder implements TensorStore {
	readonly #files: FilePool<InputFile>;
	readonly #locations = new Map<StoredChunk, Location>();

	private constructor(
		/** The iteration's folder. */
		readonly path: string,
		readonly catalog: Catalog,
		/** What the user should know, or null. */
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

	/** Opens an iteration's folder, or the one that the tracker in a root folder names. */
	static open(path: string): TorchDistFolder {
		const { folder, notice } = resolveIteration(path);
		const index = join(folder, ".metadata");
		if (!existsSync(index)) {
			const legacy = existsSync(join(folder, "mp_rank_00")) || existsSync(join(folder, "mp_rank_00_000"));
			throw new UserError(
				legacy
					? `${folder} is a checkpoint of Megatron's old format (mp_rank_…), which is not supported.`
					: `${folder} is no torch_dist checkpoint: it has no .metadata.`,
			);
		}
		const size = statSync(index).size;
		if (size > LARGEST_METADATA) throw new UserError(`${index} has ${size} bytes, too many for an index.`);
		const catalog = parseMetadata(readFileSync(index), index);
		const opened = new TorchDistFolder(folder, catalog, notice);
		try {
			opened.#checkFiles();
		} catch (error) {
			opened[Symbol.dispose]();
			throw error;
		}
		return opened;
	}

	/** Every item lies inside its file. */
	#checkFiles(): void {
		const ends = new Map<string, number>();
		const items = [...[...this.tensors.values()].flatMap(({ chunks }) => chunks), ...this.objects.values()];
		for (const { file, position, length } of items) {
			ends.set(file, Math.max(ends.get(file) ?? 0, position + length));
		}
		for (const [file, end] of ends) {
			const { size, path } = this.#files.get(file);
			if (size < end) throw new UserError(`${path} is truncated: it has ${size} bytes, .metadata names ${end}.`);
		}
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const { dtype, shape, chunks } = typeOf(this, name) as StoredTensor;
		const bytes = dtypes[dtype].bits / 8;
		for (const chunk of chunks) {
			readBox(shape, bytes, chunk, offset, into, (position, part) => this.#read(name, chunk, position, part));
		}
	}

	/** Bytes of one chunk. Reads in order follow its checksum, and the last of them verifies it. */
	#read(name: string, chunk: StoredChunk, position: number, into: Uint8Array): void {
		let location = this.#locations.get(chunk);
		if (!location) {
			location = this.#locate(name, chunk);
			this.#locations.set(chunk, location);
		}
		this.#files.get(chunk.file).readInto(location.position + position, into);
		if (location.crc === 0) return;
		if (position !== location.followed) {
			location.followed = position === 0 ? 0 : -1;
			location.sum = 0;
			if (position !== 0) return;
		}
		location.sum = crc32(into, location.sum);
		location.followed += into.byteLength;
		if (location.followed === location.size && location.sum !== location.crc) {
			throw new UserError(`${this.#files.get(chunk.file).path}: tensor ${name} is damaged (its checksum differs).`);
		}
	}

	/** Opens the chunk's archive and checks that it holds what the index says. */
	#locate(name: string, chunk: StoredChunk): Location {
		const archive = this.#archive(chunk, name);
		const where = archive.zip.where;
		const reference = archive.load(tensorGlobals, LARGEST_TENSOR_PICKLE);
		if (!(reference instanceof TensorReference)) throw new UserError(`${where} holds no tensor.`);
		const { dtype } = typeOf(this, name);
		if (reference.dtype !== dtype || reference.shape.join() !== chunk.sizes.join()) {
			throw new UserError(
				`${where} holds [${reference.shape}] ${reference.dtype}, .metadata says [${chunk.sizes}] ${dtype}.`,
			);
		}
		const record = archive.locate(reference.storage);
		const bytes = dtypes[dtype].bits / 8;
		const size = elementCount(chunk.sizes)! * bytes;
		if (!isContiguous(reference.shape, reference.strides)) {
			throw new UserError(`${where} holds a tensor that is not contiguous, which no checkpoint writer does.`);
		}
		const whole = reference.offset === 0 && size === record.size;
		return {
			position: record.position + reference.offset * bytes,
			size,
			crc: whole ? record.crc : 0,
			followed: 0,
			sum: 0,
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
 * `path` itself, or the iteration that its tracker names. If that one is gone and there is only one other, that one is
 * taken and `notice` says so; several are an error that names the newest.
 */
export function resolveIteration(path: string): { readonly folder: string; readonly notice: string | null } {
	if (!existsSync(path)) throw new UserError(`Cannot open ${path}: it does not exist.`);
	const file = join(path, tracker);
	if (!existsSync(file)) return { folder: path, notice: null };
	let text: string;
	let others: string[];
	try {
		text = readFileSync(file, "utf8").trim();
		others = readdirSync(path).filter((name) => /^(iter_[0-9]+|release)$/.test(name));
	} catch (error) {
		throw fileError("read", file, error);
	}
	if (text !== "release" && !/^[0-9]{1,15}$/.test(text)) {
		throw new UserError(`${file} says ${JSON.stringify(text.slice(0, 40))}, which is no iteration.`);
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
