/**
 * Reads native checkpoints (docs/spec/checkpoint.md §7.6, §8.3). A torn one (index missing or wrong, a file missing or
 * short) is named when it is opened; no value is given out before the checksum of its chunk is compared.
 */
import { existsSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { indexLimits, type JsonLimits, readJsonText } from "../../system/json.ts";
import { CheckedChunks, type ChunkBytes, type ChunkSum, readBox } from "../chunks.ts";
import { dtypes } from "../dtype.ts";
import { FilePool } from "../files.ts";
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
import { leftoverPattern } from "./writer.ts";

/**
 * A file beside an index that says that the folder is a local copy of a checkpoint in an object store, and may have the index alone. Its
 * text is the tag of the index there.
 */
export const copyTagName = "index.etag";

/** latest.json has five short fields. */
const latestLimits: JsonLimits = { bytes: 2 ** 16, values: 64, depth: 4 };

export class NativeCheckpoint implements TensorStore {
	readonly tensors: ReadonlyMap<string, NativeTensor>;
	readonly #files = new FilePool((name) => this.#openFile(name));
	readonly #checks = new CheckedChunks<NativeChunk>();

	private constructor(
		/** The iteration's folder. */
		readonly path: string,
		readonly manifest: Manifest,
		/** A message for the user, or null. */
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
			if (!(error instanceof UserError) || !holdsCheckpoints(path)) throw error;
			const other = NativeCheckpoint.#newestGood(path);
			if (!other) throw new UserError(`${error.message} There is no other good checkpoint in ${path}.`);
			if (options.allowFallback) {
				const notice = `${error.message} Falling back to ${other}, an older checkpoint.`;
				return NativeCheckpoint.#openFolder(other, null, notice);
			}
			throw new UserError(`${error.message} The newest good checkpoint is ${other} (--allow-fallback takes it).`);
		}
	}

	/**
	 * Opens an iteration's folder, or the newest of a root folder, without looking for others if it is bad. The newest is the
	 * one that `latest` names; without a `latest`, which a run that is killed during its first save has not written, it is that
	 * of the largest iteration, and the checkpoint has a notice.
	 */
	static openExactly(path: string): NativeCheckpoint {
		if (!existsSync(path)) throw new UserError(`Cannot open ${path}: it does not exist.`);
		if (existsSync(join(path, indexName))) return NativeCheckpoint.#openFolder(path, null, null);
		if (existsSync(join(path, latestName))) {
			const { folder, indexSha256 } = readLatest(path);
			return NativeCheckpoint.#openFolder(folder, indexSha256, null);
		}
		const newest = newestWithoutLatest(path);
		if (newest === null) {
			throw new UserError(`${path} is not a checkpoint: it has neither ${latestName} nor ${indexName}.`);
		}
		const folder = join(path, newest);
		const notice = `${path} has no ${latestName}, as after a run that was killed during its first save: taking ${folder}, its newest checkpoint.`;
		return NativeCheckpoint.#openFolder(folder, null, notice);
	}

	static #openFolder(folder: string, indexSha256: string | null, notice: string | null): NativeCheckpoint {
		const index = join(folder, indexName);
		const text = readJsonText(index, indexLimits, { inside: folder });
		if (indexSha256 !== null && new Bun.CryptoHasher("sha256").update(text).digest("hex") !== indexSha256) {
			throw new UserError(`${index} is damaged: its checksum is not the one in ${latestName}.`);
		}
		const manifest = parseManifest(text, index);
		const copy = existsSync(join(folder, copyTagName));
		for (const [name, { bytes }] of copy ? [] : Object.entries(manifest.files)) {
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
				this.#checks.read(
					chunk,
					position,
					part,
					() => this.#bytesOf(name, chunk),
					() => this.#sumOf(name, chunk),
				),
			);
		}
	}

	/** An opaque object, its checksum verified. */
	readObject(name: string): Uint8Array {
		const object = this.manifest.objects[name];
		if (!object) throw new UserError(`${this.path} has no object ${name}.`);
		const file = this.#files.get(objectsFile(this.manifest));
		const { bytes: stored } = file.information(name);
		if (stored !== object.bytes) {
			throw new UserError(`${file.path}: object ${name} has ${stored} bytes, ${indexName} says ${object.bytes}.`);
		}
		const bytes = new Uint8Array(object.bytes);
		file.readInto(name, 0, bytes);
		if (new Bun.CryptoHasher("sha256").update(bytes).digest("hex") !== object.sha256) {
			throw new UserError(`${file.path}: object ${name} is damaged (its checksum differs).`);
		}
		return bytes;
	}

	/**
	 * Compares checksums of everything, or of one of `parts` equal shares so that ranks can split the work. Throws on the
	 * first value that differs from the written one, and names it.
	 */
	verify(share: { readonly part: number; readonly parts: number } = { part: 0, parts: 1 }): void {
		const chunks = [...this.tensors].flatMap(([name, { chunks }]) => chunks.map((chunk) => ({ name, chunk })));
		const mine = chunks.filter((_, index) => index % share.parts === share.part);
		for (const { name, chunk } of mine) {
			this.#checks.check(chunk, this.#bytesOf(name, chunk), this.#sumOf(name, chunk));
		}
		if (share.part === 0) for (const name of Object.keys(this.manifest.objects)) this.readObject(name);
	}

	/** Takes every chunk as checked: the shares of verify() on all ranks together were everything. */
	trust(): void {
		for (const { chunks } of this.tensors.values()) for (const chunk of chunks) this.#checks.trust(chunk);
	}

	/** Valid until another chunk's are asked for. */
	#bytesOf(name: string, chunk: NativeChunk): ChunkBytes {
		const file = this.#chunkFile(name, chunk);
		return {
			size: file.information(chunk.name).bytes,
			readInto: (position, into) => file.readInto(chunk.name, position, into),
		};
	}

	#sumOf(name: string, chunk: NativeChunk): ChunkSum {
		const hasher = new Bun.CryptoHasher("sha256");
		return {
			update: (bytes) => hasher.update(bytes),
			finish: () => {
				if (hasher.digest("hex") === chunk.sha256) return;
				throw new UserError(`${join(this.path, chunk.file)} is damaged: the checksum of tensor ${name} differs.`);
			},
		};
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
		return openFile(join(this.path, name), name, this.manifest);
	}

	[Symbol.dispose](): void {
		this.#files[Symbol.dispose]();
	}
}

/** Opens the file `name` of a checkpoint at a path; its header has the checksum that the index says. */
function openFile(path: string, name: string, { files }: Pick<Manifest, "files">): SafetensorsFile {
	const file = openSafetensors(path, { followLinks: false });
	const sum = new Bun.CryptoHasher("sha256").update(file.readHeader()).digest("hex");
	if (sum === files[name]?.headerSha256) return file;
	file[Symbol.dispose]();
	throw new UserError(`${path} is damaged: the checksum of its header differs.`);
}

/** The file that holds the objects: the only one outside data/. */
function objectsFile({ files }: Pick<Manifest, "files">): string {
	return Object.keys(files).find((name) => !name.startsWith("data/")) ?? "objects.safetensors";
}

/** Compares every value in the file `name` of a checkpoint with its checksum; the sentence about the first that differs, or null. */
export function fileDamage(path: string, name: string, manifest: Manifest): string | null {
	const chunks = Object.values(manifest.tensors).flatMap(({ chunks }) => chunks.filter(({ file }) => file === name));
	const objects = name === objectsFile(manifest) ? Object.entries(manifest.objects) : [];
	const sums = new Map([
		...chunks.map(({ name, sha256 }) => [name, sha256] as const),
		...objects.map(([name, { sha256 }]) => [name, sha256] as const),
	]);
	try {
		using file = openFile(path, name, manifest);
		const buffer = new Uint8Array(2 ** 20);
		for (const [tensor, sha256] of sums) {
			const { bytes } = file.information(tensor);
			const hasher = new Bun.CryptoHasher("sha256");
			for (let at = 0; at < bytes; at += buffer.length) {
				const piece = buffer.subarray(0, Math.min(buffer.length, bytes - at));
				file.readInto(tensor, at, piece);
				hasher.update(piece);
			}
			if (hasher.digest("hex") !== sha256) return `the checksum of ${tensor} differs`;
		}
		return null;
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		return error.message.replace(/\.$/, "");
	}
}

/** Names of the iterations' folders, oldest first; `release`, which trainings start from, is the oldest. */
export function listIterations(root: string): string[] {
	const iteration = (name: string) => (name === "release" ? -1 : Number(name.slice("iter_".length)));
	return readdirSync(root)
		.filter((name) => /^(iter_\d+|release)$/.test(name) && existsSync(join(root, name, indexName)))
		.sort((a, b) => iteration(a) - iteration(b));
}

/** Whether a path is a checkpoint, or a root folder of at least one. */
export function isCheckpoint(path: string): boolean {
	return existsSync(join(path, indexName)) || holdsCheckpoints(path);
}

function holdsCheckpoints(root: string): boolean {
	if (!existsSync(root) || !statSync(root).isDirectory()) return false;
	return existsSync(join(root, latestName)) || newestWithoutLatest(root) !== null;
}

/** Folder's name of the largest iteration, or of one that a killed save has left aside while it replaced it; null: none. */
function newestWithoutLatest(root: string): string | null {
	return (
		listIterations(root).at(-1) ??
		readdirSync(root).find((name) => leftoverPattern.exec(name)?.[2] && existsSync(join(root, name, indexName))) ??
		null
	);
}

/** The iteration that latest.json names, or null if there is no checkpoint in `root`. */
export function latestIteration(root: string): number | null {
	return existsSync(join(root, latestName)) ? readLatest(root).iteration : null;
}

/** Content of latest.json. */
export interface Latest {
	/** Name of the iteration's folder. */
	readonly dir: string;
	readonly iteration: number | null;
	/** SHA-256 of that folder's index.json. */
	readonly indexSha256: string;
}

/** Reads and checks the text of a latest.json; `path` is for errors. */
export function parseLatest(text: string, path: string): Latest {
	const bad = (sentence: string): never => {
		throw new UserError(`${path} is damaged: ${sentence}.`);
	};
	let latest: unknown;
	try {
		latest = JSON.parse(text);
	} catch {
		return bad("it is not JSON");
	}
	const { format, dir, iteration, indexSha256 } = (latest ?? {}) as Record<string, unknown>;
	if (format !== formatName) bad(`its format is not ${formatName}`);
	if (typeof dir !== "string" || !/^(iter_\d+|release)$/.test(dir)) return bad("it names no iteration");
	if (iteration !== null && !Number.isSafeInteger(iteration)) bad("it names no iteration");
	if (typeof indexSha256 !== "string") return bad("it has no checksum");
	return { dir, iteration: iteration as number | null, indexSha256 };
}

function readLatest(root: string): { folder: string; iteration: number | null; indexSha256: string | null } {
	const path = join(root, latestName);
	const { dir, iteration, indexSha256 } = parseLatest(readJsonText(path, latestLimits, { inside: root }), path);
	// Killed while it replaced this checkpoint by another of the same iteration: the old one has a leftover's name.
	const aside = readdirSync(root).find((name) => name.startsWith(`${dir}.tmp-`) && name.endsWith("-old"));
	const there = existsSync(join(root, dir));
	const folder = join(root, there || !aside ? dir : aside);
	// Killed between the replacement and the pointer to it: the folder is the new one, whole, the checksum the old one's.
	const replaced = there && aside !== undefined;
	return { folder, iteration, indexSha256: replaced ? null : indexSha256 };
}
