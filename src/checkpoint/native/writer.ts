/**
 * Writes native checkpoints (docs/spec/checkpoint.md §7, §8.3). Rank 0 begins a save, every rank writes its chunks into
 * the temporary folder and reports them, rank 0 checks that the reports make whole tensors and publishes: the index
 * last, then the folder's name, then the `latest` pointer. Until then the previous checkpoint is untouched.
 */
import { existsSync, mkdirSync, readdirSync, renameSync, rmSync } from "node:fs";
import { basename, join } from "node:path";
import { FileDigests } from "../../native/files.ts";
import type { Library } from "../../native/library.ts";
import { UserError } from "../../system/errors.ts";
import { fileError } from "../../system/system-errors.ts";
import { type Box, partitionFault } from "../chunks.ts";
import type { DtypeTag } from "../dtype.ts";
import { type Durability, OutputFile, syncFolder, writeFileAtomically } from "../files.ts";
import { streamSafetensors, type TensorEntry } from "../safetensors.ts";
import { bytesOfType } from "../store.ts";
import {
	canonicalLayout,
	formatManifest,
	formatName,
	formatVersion,
	indexName,
	latestName,
	type Manifest,
	type NativeChunk,
	type NativeFile,
	type NativeLayout,
	type NativeObject,
	type NativeTensor,
	sortedJson,
} from "./manifest.ts";
import { newRunName } from "./writer-lock.ts";

export const defaultFileBytes = 2 ** 32;

/** A box of a tensor of a shape, which a rank writes. `data` is called once, when its turn comes. */
export interface ShardEntry extends Box, TensorEntry {}

/** A rank's report of its files and chunks: plain data, to be sent to rank 0. */
export interface ShardReport {
	readonly files: Readonly<Record<string, NativeFile>>;
	readonly chunks: readonly {
		readonly name: string;
		readonly dtype: DtypeTag;
		readonly shape: readonly number[];
		readonly chunk: NativeChunk;
	}[];
}

/** The parts of a checkpoint that rank 0 alone provides. */
export interface CheckpointDescription {
	readonly iteration: number | null;
	readonly generator: string;
	readonly model: Manifest["model"];
	readonly common: Manifest["common"];
	readonly source?: Manifest["source"];
	readonly layout?: NativeLayout;
	readonly objects?: Readonly<
		Record<string, { readonly encoding: NativeObject["encoding"]; readonly bytes: Uint8Array }>
	>;
}

/**
 * Writes a rank's boxes into data/ of the folder, in files of at most `fileBytes`; files are durable when it returns,
 * unless `sync` is false. `onBytes` is called for every piece. With a library large files are hashed on a thread of its
 * own.
 */
export function writeShard(
	folder: string,
	rank: number,
	entries: readonly ShardEntry[],
	options: {
		readonly fileBytes?: number;
		readonly onBytes?: (bytes: number) => void;
		readonly library?: Library | undefined;
		/** End of the files' names. */
		readonly suffix?: string;
	} & Durability = {},
): ShardReport {
	const files: Record<string, NativeFile> = {};
	const chunks: ShardReport["chunks"][number][] = [];
	splitFiles(entries, options.fileBytes ?? defaultFileBytes).forEach((group, index) => {
		const file = `data/${rankName(rank)}-${String(index).padStart(3, "0")}${options.suffix ?? ""}.safetensors`;
		using output = new OutputFile(join(folder, file), options);
		const boxes = group.map((entry) => ({ ...entry, shape: entry.sizes, name: chunkName(entry) }));
		const { headerSha256, sums } = streamHashed(output, boxes, options);
		output.close();
		files[file] = { bytes: output.position, headerSha256 };
		for (const { name, dtype, shape, offsets, sizes } of group) {
			const inside = chunkName({ name, offsets });
			chunks.push({ name, dtype, shape, chunk: { file, name: inside, offsets, sizes, sha256: sums.get(inside)! } });
		}
	});
	return { files, chunks };
}

/** How the names of a rank's files begin. */
export function rankName(rank: number): string {
	return `r${String(rank).padStart(5, "0")}`;
}

/** Name of a chunk inside its file: the tensor's, "@", the offsets. */
function chunkName({ name, offsets }: { readonly name: string; readonly offsets: readonly number[] }): string {
	return `${name}@${offsets.join(".")}`;
}

function splitFiles(entries: readonly ShardEntry[], fileBytes: number): ShardEntry[][] {
	const groups: ShardEntry[][] = [];
	let bytes = Number.POSITIVE_INFINITY;
	for (const entry of entries) {
		const size = bytesOfType({ dtype: entry.dtype, shape: entry.sizes });
		if (bytes + size > fileBytes) {
			groups.push([]);
			bytes = 0;
		}
		groups.at(-1)!.push(entry);
		bytes += size;
	}
	return groups;
}

/** Files of fewer bytes are hashed by the thread that writes them. */
const SMALL_FILE = 2 ** 26;

/** Sums of the tensors of a file, in order, as its bytes come. */
interface TensorSums {
	begin(bytes: number): void;
	piece(bytes: Uint8Array): void;
	end(): void;
	/** In hexadecimal. */
	all(): string[];
}

/** Hashes on the writing thread. */
class OwnSums implements TensorSums {
	#hasher = new Bun.CryptoHasher("sha256");
	readonly #sums: string[] = [];

	begin(): void {
		this.#hasher = new Bun.CryptoHasher("sha256");
	}

	piece(bytes: Uint8Array): void {
		this.#hasher.update(bytes);
	}

	end(): void {
		this.#sums.push(this.#hasher.digest("hex"));
	}

	all(): string[] {
		return this.#sums;
	}
}

/** Hashes on a thread of the native library, which reads the file back. */
class ThreadSums implements TensorSums, Disposable {
	readonly #digests: FileDigests;

	constructor(
		library: Library,
		private readonly output: OutputFile,
	) {
		this.#digests = new FileDigests(library, output);
	}

	begin(bytes: number): void {
		this.#digests.range(bytes);
	}

	piece(): void {
		this.#digests.written(this.output.position);
	}

	end(): void {}

	all(): string[] {
		return this.#digests.wait();
	}

	[Symbol.dispose](): void {
		this.#digests[Symbol.dispose]();
	}
}

/** Writes a safetensors file; the digests of its header and of every tensor. */
function streamHashed(
	output: OutputFile,
	entries: readonly TensorEntry[],
	options: { readonly onBytes?: (bytes: number) => void; readonly library?: Library | undefined } = {},
): { readonly headerSha256: string; readonly sums: ReadonlyMap<string, string> } {
	const total = entries.reduce((sum, entry) => sum + bytesOfType(entry), 0);
	using stack = new DisposableStack();
	let sums: TensorSums = new OwnSums();
	const names: string[] = [];
	let headerSha256 = "";
	streamSafetensors(
		output,
		entries,
		{},
		{
			header: (bytes) => {
				headerSha256 = new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
			},
			begin: (name, bytes) => {
				if (names.length === 0 && options.library && total >= SMALL_FILE) {
					sums = stack.use(new ThreadSums(options.library, output));
				}
				names.push(name);
				sums.begin(bytes);
			},
			piece: (_, bytes) => {
				sums.piece(bytes);
				options.onBytes?.(bytes.byteLength);
			},
			end: () => sums.end(),
		},
	);
	return { headerSha256, sums: new Map(sums.all().map((sum, index) => [names[index]!, sum])) };
}

/** Name of an iteration's folder. */
export function iterationName(iteration: number | null): string {
	return iteration === null ? "release" : `iter_${String(iteration).padStart(7, "0")}`;
}

/** A save in progress, on rank 0. */
export class NativeSave {
	constructor(
		readonly root: string,
		readonly iteration: number | null,
		/** The folder that all ranks write to, created by begin(). */
		readonly folder: string,
	) {}

	/**
	 * Makes a temporary folder below `root`, named after the run, which is the folder's only writer. Leftovers of dead runs,
	 * and of this one's failed saves, are removed.
	 */
	static begin(root: string, iteration: number | null, run = newRunName()): NativeSave {
		try {
			mkdirSync(root, { recursive: true });
			removeLeftovers(root);
			const folder = join(root, `${iterationName(iteration)}.tmp-${run}`);
			mkdirSync(join(folder, "data"), { recursive: true });
			return new NativeSave(root, iteration, folder);
		} catch (error) {
			throw fileError("write", root, error);
		}
	}

	/**
	 * Makes a checkpoint from the reports of all ranks and lets `latest` point at it. An older checkpoint of the same
	 * iteration is replaced. `commit` is called with the text of `latest` when the folder is complete and before it gets its name;
	 * `suffix` ends the name of the objects' file. Returns the checkpoint's folder.
	 */
	async publish(
		reports: readonly ShardReport[],
		description: Omit<CheckpointDescription, "iteration">,
		{ commit, suffix }: { readonly commit?: (latest: string) => Promise<void>; readonly suffix?: string } = {},
	): Promise<string> {
		const target = join(this.root, iterationName(this.iteration));
		try {
			const indexSha256 = writeIndex(this.folder, reports, { ...description, iteration: this.iteration }, { suffix });
			const latest = { format: formatName, iteration: this.iteration, dir: basename(target), indexSha256 };
			const text = `${sortedJson(latest)}\n`;
			await commit?.(text);
			const old = existsSync(target) ? `${this.folder}-old` : null;
			if (old) renameSync(target, old);
			renameSync(this.folder, target);
			syncFolder(this.root);
			writeFileAtomically(join(this.root, latestName), (file) => file.write(new TextEncoder().encode(text)));
			if (old) rmSync(old, { recursive: true, force: true });
		} catch (error) {
			if (error instanceof UserError || (error as NodeJS.ErrnoException).code === undefined) throw error;
			throw fileError("write", target, error);
		}
		return target;
	}

	/** Removes the unfinished save; the previous checkpoint stays. */
	abort(): void {
		rmSync(this.folder, { recursive: true, force: true });
	}
}

/** Names of folders that saves leave which are killed. */
export const leftoverPattern = /^(iter_\d+|release)\.tmp-[^-]*(-old)?$/;

/**
 * Gives checkpoints their names back that killed saves have set aside and not yet replaced. The caller is the folder's only
 * writer.
 */
export function restoreReplaced(root: string): void {
	for (const name of readdirSync(root)) {
		const [, iteration, old] = leftoverPattern.exec(name) ?? [];
		const target = join(root, iteration ?? "");
		if (old && !existsSync(target)) renameSync(join(root, name), target);
	}
}

/**
 * Removes folders of saves that were killed. A checkpoint that was being replaced gets its name back. The other ranks
 * of a run whose rank 0 was killed may still be ending: files that they write meanwhile are removed at the next save.
 */
function removeLeftovers(root: string): void {
	restoreReplaced(root);
	const remove = (path: string) => {
		try {
			rmSync(path, { recursive: true, force: true });
		} catch (error) {
			if ((error as NodeJS.ErrnoException).code !== "ENOTEMPTY") throw error;
		}
	};
	for (const name of readdirSync(root)) {
		if (name.startsWith(`${latestName}.tmp-`) || leftoverPattern.test(name)) remove(join(root, name));
	}
}

/** Writes objects and index into a folder whose data/ is complete; returns the index's checksum. */
export function writeIndex(
	folder: string,
	reports: readonly ShardReport[],
	description: CheckpointDescription,
	{ suffix = "", ...durability }: Durability & { readonly suffix?: string | undefined } = {},
): string {
	const tensors = joinReports(folder, reports);
	const objects: Record<string, NativeObject> = {};
	const files = Object.assign({}, ...reports.map((report) => report.files)) as Record<string, NativeFile>;
	const entries = Object.entries(description.objects ?? {});
	if (entries.length > 0) {
		const file = `objects${suffix}.safetensors`;
		using output = new OutputFile(join(folder, file), durability);
		const { headerSha256, sums } = streamHashed(
			output,
			entries.map(([name, { bytes }]) => ({ name, dtype: "U8", shape: [bytes.byteLength], data: () => bytes })),
		);
		output.close();
		files[file] = { bytes: output.position, headerSha256 };
		for (const [name, { encoding, bytes }] of entries) {
			objects[name] = { encoding, bytes: bytes.byteLength, sha256: sums.get(name)! };
		}
	}
	const manifest: Manifest = {
		format: formatName,
		version: formatVersion,
		iteration: description.iteration,
		created: new Date().toISOString(),
		generator: description.generator,
		model: description.model,
		layout: description.layout ?? canonicalLayout,
		source: description.source ?? {},
		files,
		tensors,
		objects,
		common: description.common,
	};
	const text = new TextEncoder().encode(formatManifest(manifest));
	syncFolder(join(folder, "data"), durability);
	writeFileAtomically(join(folder, indexName), (file) => file.write(text), durability);
	return new Bun.CryptoHasher("sha256").update(text).digest("hex");
}

/** The tensors that the ranks wrote together; they must agree, and their chunks fill every tensor exactly. */
function joinReports(folder: string, reports: readonly ShardReport[]): Record<string, NativeTensor> {
	const tensors = new Map<string, { dtype: DtypeTag; shape: readonly number[]; chunks: NativeChunk[] }>();
	for (const { name, dtype, shape, chunk } of reports.flatMap(({ chunks }) => chunks)) {
		const known = tensors.get(name);
		if (!known) tensors.set(name, { dtype, shape, chunks: [chunk] });
		else if (known.dtype !== dtype || known.shape.join() !== shape.join()) {
			throw new RangeError(`Ranks disagree on ${name}: [${known.shape}] ${known.dtype} and [${shape}] ${dtype}.`);
		} else known.chunks.push(chunk);
	}
	for (const [name, { shape, chunks }] of tensors) {
		const fault = partitionFault(shape, chunks);
		if (fault) throw new RangeError(`Tensor ${name} in ${folder} ${fault}.`);
		chunks.sort((a, b) => (a.name < b.name ? -1 : 1));
	}
	return Object.fromEntries(tensors);
}
