/**
 * Reads native checkpoints (checkpoint.md §7.6, §8.3). A torn one (index missing or wrong, a file missing or short) is
 * named when it is opened; altered values are found by their checksums, as they are read in order or by verify().
 */
import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../native/errors.ts";
import { readBox } from "../chunks.ts";
import { dtypes } from "../dtype.ts";
import { FilePool, fileError } from "../files.ts";
import { openSafetensors, type SafetensorsFile } from "../safetensors.ts";
import { type TensorStore, typeOf } from "../store.ts";
import {
	formatName,
	indexName,
	latestName,
	type Manifest,
	type NativeChunk,
	type NativeTensor,
	parseManifest,
} from "./manifest.ts";
import { objectsName } from "./writer.ts";

const LARGEST_INDEX = 2 ** 30;
const PIECE = 2 ** 24;

export class NativeCheckpoint implements TensorStore {
	readonly tensors: ReadonlyMap<string, NativeTensor>;
	readonly #files = new FilePool((name) => this.#openFile(name));

	private constructor(
		/** The iteration's folder. */
		readonly path: string,
		readonly manifest: Manifest,
		/** What the user should know, or null. */
		readonly notice: string | null,
	) {
		this.tensors = new Map(Object.entries(manifest.tensors));
	}

	/**
	 * Opens an iteration's folder, or the newest checkpoint of a root folder. If that one is damaged the error names the
	 * newest good one, which `allowFallback` takes instead.
	 */
	static open(path: string, options: { readonly allowFallback?: boolean } = {}): NativeCheckpoint {
		try {
			return NativeCheckpoint.openExactly(path);
		} catch (error) {
			if (!(error instanceof UserError) || !existsSync(join(path, latestName))) throw error;
			const other = NativeCheckpoint.#newestGood(path);
			if (!other) throw new UserError(`${error.message} There is no other good checkpoint in ${path}.`);
			if (options.allowFallback) {
				const notice = `${error.message} Falling back to ${other}, an older checkpoint.`;
				return NativeCheckpoint.#openFolder(other, null, notice);
			}
			throw new UserError(`${error.message} The newest good checkpoint is ${other} (--allow-fallback takes it).`);
		}
	}

	/** The same without looking for others: an iteration's folder, or the one that a root's `latest` names. */
	static openExactly(path: string): NativeCheckpoint {
		if (!existsSync(path)) throw new UserError(`Cannot open ${path}: it does not exist.`);
		if (existsSync(join(path, indexName))) return NativeCheckpoint.#openFolder(path, null, null);
		if (!existsSync(join(path, latestName))) {
			throw new UserError(`${path} is no checkpoint: it has neither ${latestName} nor ${indexName}.`);
		}
		const { folder, indexSha256 } = readLatest(path);
		return NativeCheckpoint.#openFolder(folder, indexSha256, null);
	}

	static #openFolder(folder: string, indexSha256: string | null, notice: string | null): NativeCheckpoint {
		const index = join(folder, indexName);
		const text = readIndex(index);
		if (indexSha256 !== null && new Bun.CryptoHasher("sha256").update(text).digest("hex") !== indexSha256) {
			throw new UserError(`${index} is damaged: its checksum is not the one in ${latestName}.`);
		}
		const manifest = parseManifest(text, index);
		for (const [name, { bytes }] of Object.entries(manifest.files)) {
			const file = join(folder, name);
			if (!existsSync(file)) throw new UserError(`${folder} is torn: ${name} is missing.`);
			const { size } = statSync(file);
			if (size !== bytes) throw new UserError(`${folder} is torn: ${name} has ${size} of ${bytes} bytes.`);
		}
		return new NativeCheckpoint(folder, manifest, notice);
	}

	/** The newest checkpoint whose every byte is as it was written. */
	static #newestGood(root: string): string | null {
		for (const name of listIterations(root).reverse()) {
			const folder = join(root, name);
			try {
				using checkpoint = NativeCheckpoint.#openFolder(folder, null, null);
				checkpoint.verify();
				return folder;
			} catch (error) {
				if (!(error instanceof UserError)) throw error;
			}
		}
		return null;
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const { dtype, shape, chunks } = typeOf(this, name) as NativeTensor;
		for (const chunk of chunks) {
			readBox(shape, dtypes[dtype].bits / 8, chunk, offset, into, (position, part) =>
				this.#chunkFile(name, chunk).readInto(chunk.name, position, part),
			);
		}
	}

	/** An opaque object, its checksum verified. */
	readObject(name: string): Uint8Array {
		const object = this.manifest.objects[name];
		if (!object) throw new UserError(`${this.path} has no object ${name}.`);
		const file = this.#files.get(objectsName);
		const bytes = new Uint8Array(object.bytes);
		if (file.information(name).bytes !== object.bytes) {
			throw new UserError(`${file.path}: object ${name} is damaged (its size differs).`);
		}
		file.readInto(name, 0, bytes);
		if (new Bun.CryptoHasher("sha256").update(bytes).digest("hex") !== object.sha256) {
			throw new UserError(`${file.path}: object ${name} is damaged (its checksum differs).`);
		}
		return bytes;
	}

	/**
	 * Compares checksums: of everything, or of one of `parts` equal shares so that ranks can split the work. Throws on the
	 * first value that is not what was written, and names it.
	 */
	verify(share: { readonly part: number; readonly parts: number } = { part: 0, parts: 1 }): void {
		const chunks = [...this.tensors].flatMap(([name, { chunks }]) => chunks.map((chunk) => ({ name, chunk })));
		const mine = chunks.filter((_, index) => index % share.parts === share.part);
		const buffer = new Uint8Array(PIECE);
		for (const { name, chunk } of mine) {
			const file = this.#chunkFile(name, chunk);
			const { bytes } = file.information(chunk.name);
			const hasher = new Bun.CryptoHasher("sha256");
			for (let offset = 0; offset < bytes; offset += PIECE) {
				const piece = buffer.subarray(0, Math.min(PIECE, bytes - offset));
				file.readInto(chunk.name, offset, piece);
				hasher.update(piece);
			}
			if (hasher.digest("hex") !== chunk.sha256) {
				throw new UserError(`${file.path} is damaged: the checksum of tensor ${name} differs.`);
			}
		}
		if (share.part === 0) for (const name of Object.keys(this.manifest.objects)) this.readObject(name);
	}

	/** The file of a chunk, which must hold it with the dtype and size that the index says. */
	#chunkFile(name: string, chunk: NativeChunk): SafetensorsFile {
		const file = this.#files.get(chunk.file);
		const stored = file.information(chunk.name);
		const { dtype } = typeOf(this, name);
		if (stored.dtype !== dtype || stored.shape.join() !== chunk.sizes.join()) {
			throw new UserError(
				`${file.path}: tensor ${chunk.name} is [${stored.shape}] ${stored.dtype}, ${indexName} says [${chunk.sizes}] ${dtype}.`,
			);
		}
		return file;
	}

	#openFile(name: string): SafetensorsFile {
		const file = openSafetensors(join(this.path, name), { followLinks: false });
		const sum = new Bun.CryptoHasher("sha256").update(file.readHeader()).digest("hex");
		if (sum === this.manifest.files[name]?.headerSha256) return file;
		file[Symbol.dispose]();
		throw new UserError(`${join(this.path, name)} is damaged: the checksum of its header differs.`);
	}

	[Symbol.dispose](): void {
		this.#files[Symbol.dispose]();
	}
}

function readIndex(path: string): string {
	try {
		const { size } = statSync(path);
		if (size > LARGEST_INDEX) throw new UserError(`${path} has ${size} bytes, too many for an index.`);
		return readFileSync(path, "utf8");
	} catch (error) {
		if (error instanceof UserError) throw error;
		throw fileError("open", path, error);
	}
}

/** Names of the iterations' folders, oldest first. */
export function listIterations(root: string): string[] {
	return readdirSync(root)
		.filter((name) => /^(iter_\d+|release)$/.test(name) && existsSync(join(root, name, indexName)))
		.sort((a, b) => Number(a.slice(5)) - Number(b.slice(5)) || (a < b ? -1 : 1));
}

/** The iteration that latest.json names, or null if there is no checkpoint in `root`. */
export function latestIteration(root: string): number | null {
	return existsSync(join(root, latestName)) ? readLatest(root).iteration : null;
}

function readLatest(root: string): { folder: string; iteration: number | null; indexSha256: string | null } {
	const path = join(root, latestName);
	const bad = (sentence: string): never => {
		throw new UserError(`${path} is damaged: ${sentence}.`);
	};
	let latest: Record<string, unknown>;
	try {
		latest = JSON.parse(readIndex(path));
	} catch (error) {
		if (error instanceof UserError) throw error;
		return bad("it is no JSON");
	}
	const { format, dir, iteration, indexSha256 } = latest ?? {};
	if (format !== formatName) bad(`its format is not ${formatName}`);
	if (typeof dir !== "string" || !/^(iter_\d+|release)$/.test(dir)) return bad("it names no iteration");
	if (iteration !== null && !Number.isSafeInteger(iteration)) bad("it names no iteration");
	if (typeof indexSha256 !== "string") return bad("it has no checksum");
	// Killed while it replaced this checkpoint by another of the same iteration: the old one has a leftover's name.
	const aside = readdirSync(root).find((name) => name.startsWith(`${dir}.tmp-`) && name.endsWith("-old"));
	const there = existsSync(join(root, dir));
	const folder = join(root, there || !aside ? dir : aside);
	// Killed between the replacement and the pointer to it: the folder is the new one, whole, the checksum the old one's.
	const replaced = there && aside !== undefined;
	return { folder, iteration: iteration as number | null, indexSha256: replaced ? null : (indexSha256 as string) };
}
