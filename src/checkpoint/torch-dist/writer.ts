/**
 * Writes a torch_dist checkpoint: .distcp files of torch.save archives, common.pt, .metadata, and metadata.json last,
 * by which Megatron recognises a checkpoint (docs/spec/checkpoint.md §1, §7). Tensors are streamed.
 */
import { join } from "node:path";
import type { Box } from "../chunks.ts";
import { dtypes } from "../dtype.ts";
import { type Durability, OutputFile, syncFolder } from "../files.ts";
import { Global, TorchDtype, Tuple } from "../pickle/values.ts";
import { Call, instance, pickle, torchSize, writeEmptyTensorList, writeObject, writeTensor } from "../pickle/writer.ts";
import { readPieces, type TensorStore, type TensorType } from "../store.ts";
import type { ExtraState } from "./common.ts";

/** Tensors are cut along their first axes into chunks of about this size; PyTorch loads whole chunks. */
const CHUNK_BYTES = 2 ** 28;
export const defaultFileBytes = 2 ** 32;

export interface TorchDistContent {
	/** Tensors under their keys on disk. */
	readonly tensors: TensorStore;
	readonly extraStates: ReadonlyMap<string, ExtraState>;
	/** Byte items, given as torch.save archives. */
	readonly items: ReadonlyMap<string, Uint8Array>;
	/** Byte items, given as values; each is written as a list of one, as upstream does. */
	readonly objects: ReadonlyMap<string, unknown>;
	/** The content of common.pt. */
	readonly common: ReadonlyMap<string, unknown>;
}

interface Item {
	readonly file: string;
	readonly position: number;
	readonly length: number;
}

/** Writes a checkpoint into a new folder. `onBytes` is called for every piece of a tensor. */
export function writeTorchDistFiles(
	folder: string,
	content: TorchDistContent,
	options: { readonly fileBytes?: number; readonly onBytes?: (bytes: number) => void } & Durability = {},
): void {
	const files = new RollingFiles(folder, options.fileBytes ?? defaultFileBytes, options);
	const objects = new Map<string, Item>();
	const chunks = new Map<string, (Box & Item)[]>();
	try {
		for (const [name, bytes] of content.items) {
			objects.set(
				name,
				files.item((file) => {
					file.write(bytes);
					return bytes.byteLength;
				}),
			);
		}
		for (const [name, value] of content.objects)
			objects.set(
				name,
				files.item((file) => writeObject(file, [value])),
			);
		for (const [name, kind] of content.extraStates) {
			const write = kind === "none" ? (file: OutputFile) => writeObject(file, [null]) : writeEmptyTensorList;
			objects.set(name, files.item(write));
		}
		for (const [name, type] of content.tensors.tensors) {
			const written = cutTensor(type).map(({ offsets, sizes, begin, bytes }) => {
				const pieces = () => observed(readPieces(content.tensors, name, { begin, bytes }), options.onBytes);
				const write = (file: OutputFile) => {
					file.expect(bytes);
					return writeTensor(file, type.dtype, sizes, pieces());
				};
				return { offsets, sizes, ...files.item(write) };
			});
			chunks.set(name, written);
		}
		files.close();
	} finally {
		files[Symbol.dispose]();
	}
	const writeFile = (name: string, write: (file: OutputFile) => unknown) => {
		using file = new OutputFile(join(folder, name), options);
		write(file);
		file.close();
	};
	writeFile("common.pt", (file) => writeObject(file, content.common, "common"));
	const metadata = pickle(metadataOf(content.tensors.tensors, chunks, objects));
	writeFile(".metadata", (file) => file.write(metadata));
	const marker = { sharded_backend: "torch_dist", sharded_backend_version: 1 };
	writeFile("metadata.json", (file) => file.write(new TextEncoder().encode(JSON.stringify(marker))));
	syncFolder(folder, options);
}

function* observed(pieces: Iterable<Uint8Array>, onBytes?: (bytes: number) => void): Generator<Uint8Array> {
	for (const piece of pieces) {
		yield piece;
		onBytes?.(piece.byteLength);
	}
}

/** Numbered files, each closed when it has reached `bytes`. */
class RollingFiles implements Disposable {
	#file: OutputFile | null = null;
	#count = 0;

	constructor(
		readonly folder: string,
		readonly bytes: number,
		readonly durability: Durability,
	) {}

	item(write: (file: OutputFile) => number): Item {
		if (this.#file && this.#file.position >= this.bytes) this.close();
		const name = `__0_${this.#file ? this.#count - 1 : this.#count++}.distcp`;
		this.#file ??= new OutputFile(join(this.folder, name), this.durability);
		const position = this.#file.position;
		return { file: name, position, length: write(this.#file) };
	}

	close(): void {
		this.#file?.close();
		this.#file = null;
	}

	[Symbol.dispose](): void {
		this.#file?.[Symbol.dispose]();
	}
}

/** Divides a tensor into boxes that are contiguous in memory, of at most `chunkBytes` where an element is not larger. */
function cutTensor(
	{ dtype, shape }: TensorType,
	chunkBytes = CHUNK_BYTES,
): (Box & { readonly begin: number; readonly bytes: number })[] {
	const elementBytes = dtypes[dtype].bits / 8;
	const volume = (sizes: readonly number[]) => sizes.reduce((product, size) => product * size, elementBytes);
	const whole = { offsets: shape.map(() => 0), sizes: [...shape], begin: 0, bytes: volume(shape) };
	const boxes = [whole];
	// Where a single index of an axis still exceeds the size, the next axis is cut too.
	for (let axis = 0; axis < shape.length; axis++) {
		const next: typeof boxes = [];
		for (const box of boxes) {
			if (box.bytes <= chunkBytes) {
				next.push(box);
				continue;
			}
			const stride = volume(shape.slice(axis + 1));
			const step = Math.max(1, Math.floor(chunkBytes / stride));
			for (let start = 0; start < box.sizes[axis]!; start += step) {
				const count = Math.min(step, box.sizes[axis]! - start);
				next.push({
					offsets: box.offsets.with(axis, start),
					sizes: box.sizes.with(axis, count),
					begin: box.begin + start * stride,
					bytes: count * stride,
				});
			}
		}
		boxes.splice(0, boxes.length, ...next);
	}
	return boxes;
}

const metadataModule = "torch.distributed.checkpoint.metadata";

function metadataOf(
	types: ReadonlyMap<string, TensorType>,
	chunks: ReadonlyMap<string, readonly (Box & Item)[]>,
	objects: ReadonlyMap<string, Item>,
): unknown {
	const described = new Map<string, unknown>();
	const stored = new Map<unknown, unknown>();
	const store = (fqn: string, offsets: readonly number[] | null, { file, position, length }: Item) => {
		const index = offsets === null ? { fqn, index: null } : { fqn, index: null, offset: torchSize(offsets) };
		stored.set(
			instance(metadataModule, "MetadataIndex", index),
			instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", {
				relative_path: file,
				offset: position,
				length,
			}),
		);
	};
	for (const [name, item] of objects) {
		described.set(name, instance(metadataModule, "BytesStorageMetadata"));
		store(name, null, item);
	}
	for (const [name, { dtype, shape }] of types) {
		const layout = new Call(new Global("torch.serialization", "_get_layout"), ["torch.strided"]);
		const memoryFormat = new Call(new Global(metadataModule, "_MEM_FORMAT_ENCODING"), [0]);
		const properties = new Tuple([new TorchDtype(dtype), layout, false, memoryFormat, false]);
		described.set(
			name,
			instance(metadataModule, "TensorStorageMetadata", {
				properties: instance(metadataModule, "TensorProperties", properties),
				size: torchSize(shape),
				chunks: chunks.get(name)!.map(({ offsets, sizes }) =>
					instance(metadataModule, "ChunkStorageMetadata", {
						offsets: torchSize(offsets),
						sizes: torchSize(sizes),
					}),
				),
			}),
		);
		for (const chunk of chunks.get(name)!) store(name, chunk.offsets, chunk);
	}
	return instance(metadataModule, "Metadata", {
		state_dict_metadata: described,
		planner_data: null,
		storage_data: stored,
		storage_meta: null,
		version: "1.0.0",
	});
}
