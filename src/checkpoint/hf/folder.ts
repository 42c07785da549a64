/**
 * A Hugging Face model folder: config.json, and model.safetensors or shards with an index
 * (docs/spec/checkpoint.md §8.2). Read tensor by tensor under its own names; written atomically.
 */
import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { configLimits, indexLimits, readJsonText } from "../../system/json.ts";
import { type Durability, OutputFile } from "../files.ts";
import { requirePlainName } from "../folders.ts";
import { openSafetensors, type SafetensorsFile, safetensorsLayout } from "../safetensors.ts";
import { bytesOfType, readPieces, type TensorStore, type TensorType } from "../store.ts";
import { type Unquantised, unquantised } from "./quantisation.ts";

export const singleFile = "model.safetensors";
export const indexFile = "model.safetensors.index.json";

/** The default of huggingface_hub's writer. */
export const defaultShardBytes = 5e9;

export class HuggingFaceFolder implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	readonly #files: readonly SafetensorsFile[];
	readonly #stored: Pick<TensorStore, "tensors" | "readInto">;
	/** config.json as it stands in the folder, but of weights that are quantised, which are read as bf16. */
	readonly configText: string;
	/** That they are; null: they are not. */
	readonly notice: string | null;

	private constructor(
		readonly path: string,
		{ configText, decode, notice }: Unquantised,
		files: readonly SafetensorsFile[],
		fileOf: ReadonlyMap<string, SafetensorsFile>,
	) {
		this.#files = files;
		this.configText = configText;
		this.notice = notice;
		const tensors = new Map([...fileOf].map(([name, file]) => [name, file.information(name)]));
		const readInto = (name: string, offset: number, into: Uint8Array) => fileOf.get(name)!.readInto(name, offset, into);
		this.#stored = decode?.({ path, tensors, readInto }) ?? { tensors, readInto };
		this.tensors = this.#stored.tensors;
	}

	get configPath(): string {
		return join(this.path, "config.json");
	}

	static open(path: string): HuggingFaceFolder {
		const configuration = readConfig(path);
		const files: SafetensorsFile[] = [];
		try {
			const fileOf = new Map<string, SafetensorsFile>();
			if (existsSync(join(path, indexFile))) openShards(path, files, fileOf);
			else {
				const file = openSafetensors(join(path, singleFile), { inside: path });
				files.push(file);
				for (const name of file.tensors.keys()) fileOf.set(name, file);
			}
			return new HuggingFaceFolder(path, configuration, files, fileOf);
		} catch (error) {
			for (const file of files) file[Symbol.dispose]();
			throw error;
		}
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		if (!this.tensors.has(name)) throw new UserError(`${this.path} has no tensor ${name}.`);
		this.#stored.readInto(name, offset, into);
	}

	[Symbol.dispose](): void {
		for (const file of this.#files) file[Symbol.dispose]();
	}
}

/** A folder's config.json, as if weights that are quantised were bf16. */
export function readConfig(path: string): Unquantised {
	if (!existsSync(path)) throw new UserError(`Cannot open ${path}: it does not exist.`);
	if (!statSync(path).isDirectory()) throw new UserError(`Cannot open ${path}: it is not a folder.`);
	const file = join(path, "config.json");
	return unquantised(readJsonText(file, configLimits, { inside: path }), file);
}

/** The file of every tensor, from the text of a model.safetensors.index.json; `path` is for errors. */
export function parseWeightMap(text: string, path: string): ReadonlyMap<string, string> {
	let map: unknown;
	try {
		map = (JSON.parse(text) as { weight_map?: unknown } | null)?.weight_map;
	} catch (error) {
		throw new UserError(`${path} is not JSON: ${(error as Error).message}.`);
	}
	if (typeof map !== "object" || map === null || Array.isArray(map)) {
		throw new UserError(`${path} has no weight_map.`);
	}
	const files = new Map<string, string>();
	for (const [tensor, name] of Object.entries(map)) {
		if (typeof name !== "string") throw new UserError(`${path}: the file of ${tensor} is not a string.`);
		files.set(tensor, requirePlainName(name, path));
	}
	return files;
}

function openShards(folder: string, files: SafetensorsFile[], fileOf: Map<string, SafetensorsFile>): void {
	const path = join(folder, indexFile);
	const opened = new Map<string, SafetensorsFile>();
	for (const [tensor, name] of parseWeightMap(readJsonText(path, indexLimits, { inside: folder }), path)) {
		let file = opened.get(name);
		if (!file) {
			file = openSafetensors(join(folder, name), { inside: folder });
			opened.set(name, file);
			files.push(file);
		}
		if (!file.tensors.has(tensor)) throw new UserError(`${file.path} has no tensor ${tensor}, which ${path} names.`);
		fileOf.set(tensor, file);
	}
}

/** Tensors in files of at most `shardBytes` (one larger tensor fills a file of its own). */
function planShards(
	tensors: ReadonlyMap<string, TensorType>,
	shardBytes: number,
): { readonly file: string; readonly names: readonly string[] }[] {
	const groups: string[][] = [[]];
	let bytes = 0;
	for (const [name, type] of tensors) {
		const size = bytesOfType(type);
		if (bytes > 0 && bytes + size > shardBytes) {
			groups.push([]);
			bytes = 0;
		}
		groups.at(-1)!.push(name);
		bytes += size;
	}
	if (groups.length === 1) return [{ file: singleFile, names: groups[0]! }];
	const digits = (n: number) => String(n).padStart(5, "0");
	return groups.map((names, i) => ({
		file: `model-${digits(i + 1)}-of-${digits(groups.length)}.safetensors`,
		names,
	}));
}

/** The part of a folder's tensors that a process writes, where several write it together. */
export interface Share {
	/** Whether it makes the files, and writes what is no tensor. */
	readonly first: boolean;
	/** Names of its tensors, in turn; each can be read until the next are asked for. */
	readonly rounds: Iterable<readonly string[]>;
	/** Waits for the other processes. */
	readonly barrier: () => void;
}

export interface FilesOptions extends Durability {
	readonly configText: string;
	readonly shardBytes?: number;
	/** Called for every written piece. */
	readonly onBytes?: (bytes: number) => void;
	/** Default: all. */
	readonly share?: Share | null;
}

/** Fills a new folder: shards, config.json, then the index. */
export function writeHuggingFaceFiles(folder: string, store: TensorStore, options: FilesOptions): void {
	const shards = planShards(store.tensors, options.shardBytes ?? defaultShardBytes);
	const layouts = shards.map(({ file, names }) => {
		const path = join(folder, file);
		const entries = names.map((name) => ({ name, ...store.tensors.get(name)! }));
		return { path, ...safetensorsLayout(path, entries, { format: "pt" }) };
	});
	const places = new Map(
		layouts.flatMap(({ path, places }) => [...places].map(([{ name }, position]) => [name, { path, position }])),
	);
	const { first, rounds, barrier } = options.share ?? { first: true, rounds: [places.keys()], barrier: () => {} };
	if (first) {
		for (const { path, header, bytes } of layouts) {
			using output = new OutputFile(path, options);
			output.expect(bytes);
			output.write(header);
			output.close();
		}
	}
	barrier();
	using output = new OutputOfOne(options);
	for (const names of rounds) {
		for (const name of names) {
			const file = output.at(places.get(name)!);
			for (const piece of readPieces(store, name)) {
				file.write(piece);
				options.onBytes?.(piece.byteLength);
			}
		}
	}
	output.close();
	barrier();
	if (!first) return;
	const writeText = (name: string, text: string) => {
		using file = new OutputFile(join(folder, name), options);
		file.write(new TextEncoder().encode(text));
		file.close();
	};
	writeText("config.json", options.configText);
	if (shards.length > 1) {
		const weights = shards.flatMap(({ file, names }) => names.map((name) => [name, file] as const));
		const index = {
			metadata: { total_size: [...store.tensors.values()].reduce((sum, type) => sum + bytesOfType(type), 0) },
			weight_map: Object.fromEntries(weights.sort(([a], [b]) => (a < b ? -1 : 1))),
		};
		writeText(indexFile, `${JSON.stringify(index, null, 2)}\n`);
	}
}

/** The file of several that is written to. */
class OutputOfOne implements Disposable {
	#file: OutputFile | null = null;

	constructor(private readonly options: Durability) {}

	/** The file, to be written from `position` on; another is closed before. */
	at({ path, position }: { readonly path: string; readonly position: number }): OutputFile {
		if (this.#file?.path !== path) this.close();
		this.#file ??= new OutputFile(path, { ...this.options, there: true });
		this.#file.seek(position);
		return this.#file;
	}

	close(): void {
		this.#file?.close();
		this.#file = null;
	}

	[Symbol.dispose](): void {
		this.#file?.[Symbol.dispose]();
	}
}
