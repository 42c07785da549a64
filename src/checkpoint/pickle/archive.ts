/**
 * Reads torch.save archives: the pickled object and the values of its tensors. openTorchFile opens a .pt file; a
 * TorchArchive is one item of a .distcp file.
 */
import { UserError } from "../../system/errors.ts";
import { InputFile } from "../../system/input-file.ts";
import { dtypes, elementCount, type TensorArray, viewAs } from "../dtype.ts";
import { StorageType, stateGlobals } from "./allowed.ts";
import { type AllowedGlobals, unpickle } from "./machine.ts";
import { StorageReference, type TensorReference, Tuple } from "./values.ts";
import { ZipArchive } from "./zip.ts";

/** Bytes of the largest pickle; a tensor's pickle has some 200 bytes. */
const LARGEST_PICKLE = 2 ** 27;
const MOST_VALUES = 2 ** 22;

export class TorchArchive {
	readonly #prefix: string;

	constructor(readonly zip: ZipArchive) {
		const pickle = [...zip.names].filter((name) => name === "data.pkl" || name.endsWith("/data.pkl"));
		if (pickle.length !== 1) throw new UserError(`${zip.where} is not a torch.save archive: it has no data.pkl.`);
		this.#prefix = pickle[0]!.slice(0, -"data.pkl".length);
		const order = `${this.#prefix}byteorder`;
		if (zip.has(order) && new TextDecoder().decode(zip.read(order, 16)) !== "little") {
			throw new UserError(`${zip.where} was written on a big-endian machine, which is not supported.`);
		}
	}

	/** The object, with TensorReferences for its tensors; `limit`: bytes that its pickle may have. */
	load(allowed: AllowedGlobals, limit = LARGEST_PICKLE): unknown {
		const bytes = this.zip.read(`${this.#prefix}data.pkl`, limit);
		return unpickle(bytes, this.zip.where, { allowed, persistent: storageOf, limits: { values: MOST_VALUES } });
	}

	/** Position of a storage's bytes in the file. Throws a UserError where their number differs from the pickle's. */
	locate(storage: StorageReference): { readonly position: number; readonly size: number; readonly crc: number } {
		const record = this.zip.locate(`${this.#prefix}data/${storage.key}`);
		const expected = storage.length * (storage.dtype === null ? 1 : dtypes[storage.dtype].bits / 8);
		if (record.size !== expected) {
			throw new UserError(
				`${this.zip.where}: storage ${storage.key} has ${record.size} bytes, and its tensor needs ${expected}.`,
			);
		}
		return record;
	}

	/** The values of a tensor, made contiguous. */
	read({ storage, dtype, offset, shape, strides }: TensorReference): TensorArray {
		const bytes = dtypes[dtype].bits / 8;
		if (!Number.isInteger(bytes)) throw new UserError(`${this.zip.where}: tensors of ${dtype} are not supported.`);
		const { position } = this.locate(storage);
		const elements = elementCount(shape)!;
		if (elements === 0) return viewAs(dtype, new Uint8Array(0));
		if (isContiguous(shape, strides)) {
			return viewAs(dtype, this.zip.file.read(position + offset * bytes, elements * bytes));
		}
		// An expanded dimension (stride 0) repeats elements, so the result is bounded by the stored size.
		if (elements > 64 * storage.length + 1024) {
			throw new UserError(`${this.zip.where}: a tensor of shape [${shape}] repeats few stored elements.`);
		}
		const stored = this.zip.file.read(position, this.locate(storage).size);
		const values = new Uint8Array(elements * bytes);
		const index = shape.map(() => 0);
		for (let i = 0; i < elements; i++) {
			const from = (offset + index.reduce((sum, at, axis) => sum + at * strides[axis]!, 0)) * bytes;
			values.set(stored.subarray(from, from + bytes), i * bytes);
			for (let axis = shape.length - 1; axis >= 0 && ++index[axis]! === shape[axis]; axis--) index[axis] = 0;
		}
		return viewAs(dtype, values);
	}
}

export function isContiguous(shape: readonly number[], strides: readonly number[]): boolean {
	let expected = 1;
	for (let axis = shape.length - 1; axis >= 0; axis--) {
		if (shape[axis] !== 1 && strides[axis] !== expected) return false;
		expected *= shape[axis]!;
	}
	return true;
}

/** The storage of a persistent id ("storage", type, key, location, length); the location is ignored. */
export function storageOf(id: unknown): StorageReference {
	const [word, type, key, , length] = id instanceof Tuple ? id.items : [];
	if (word !== "storage" || !(type instanceof StorageType)) throw new RangeError("a persistent id is not a storage");
	if (typeof key !== "string" || !/^[0-9]{1,18}$/.test(key)) throw new RangeError("a storage has an invalid key");
	if (!Number.isSafeInteger(length) || (length as number) < 0) throw new RangeError("a storage has an invalid size");
	const bytes = type.dtype === null ? 1 : dtypes[type.dtype].bits / 8;
	if (!Number.isSafeInteger((length as number) * bytes)) throw new RangeError("a storage has an invalid size");
	return new StorageReference(type.dtype, key, length as number);
}

export interface TorchFile extends Disposable {
	readonly value: unknown;
	readTensor(reference: TensorReference): TensorArray;
}

/**
 * Opens a file of torch.save (the zip format). Globals outside the list of allowed names are refused; instances of the
 * classes in `inert` ("module Class") become PythonObjects. A link must not lead out of the folder `inside`.
 */
export function openTorchFile(
	path: string,
	options: { readonly inert?: readonly string[]; readonly inside?: string } = {},
): TorchFile {
	const file = InputFile.open(path, { inside: options.inside });
	try {
		if (file.size < 4 || new DataView(file.read(0, 4).buffer).getUint32(0, true) !== 0x04034b50) {
			throw new UserError(`${path} is not a zip archive; files of torch.save before PyTorch 1.6 are not supported.`);
		}
		const archive = new TorchArchive(ZipArchive.open(file));
		return {
			value: archive.load(stateGlobals(options.inert)),
			readTensor: (reference) => archive.read(reference),
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	} catch (error) {
		file[Symbol.dispose]();
		throw error;
	}
}
