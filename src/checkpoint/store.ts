/** The interface of every open checkpoint format: named dense tensors that are read by ranges of their bytes. */
import { UserError } from "../system/errors.ts";
import { type DtypeTag, type TensorArray, tensorBytes, viewAs } from "./dtype.ts";

export interface TensorType {
	readonly dtype: DtypeTag;
	readonly shape: readonly number[];
}

export interface TensorStore extends Disposable {
	/** File or folder, for messages. */
	readonly path: string;
	readonly tensors: ReadonlyMap<string, TensorType>;
	/** The tensors that `name` is made of in the stores below; absent where tensors are stored. */
	originsOf?(name: string): readonly { readonly store: TensorStore; readonly name: string }[];
	/** Fills `into` with the row-major little-endian values of a tensor, from byte `offset` on. */
	readInto(name: string, offset: number, into: Uint8Array): void;
}

/** Dtype and shape of a tensor in a store; an absent tensor is an error that names both. */
export function typeOf(store: Pick<TensorStore, "path" | "tensors">, name: string): TensorType {
	const type = store.tensors.get(name);
	if (!type) throw new UserError(`${store.path} has no tensor ${name}.`);
	return type;
}

/** Bytes of a tensor whose type was checked when its store was opened. */
export function bytesOfType({ dtype, shape }: TensorType): number {
	const bytes = tensorBytes(dtype, shape);
	if (bytes === null) throw new RangeError(`A tensor of shape [${shape}] ${dtype} has an invalid size.`);
	return bytes;
}

/** All values of a tensor in memory of the caller's. bf16 and f16 come as their bits. */
export function readTensor(store: TensorStore, name: string): TensorArray {
	const type = typeOf(store, name);
	const bytes = new Uint8Array(bytesOfType(type));
	store.readInto(name, 0, bytes);
	return viewAs(type.dtype, bytes);
}

/** Bytes of a piece of a tensor, which stays in a core's cache while it is read, hashed and written in turn. */
const PIECE = 2 ** 18;

/**
 * The bytes of a tensor, or of a range of it, in pieces of at most `pieceBytes`, each valid until the next is asked for.
 */
export function* readPieces(
	store: TensorStore,
	name: string,
	range: {
		readonly begin?: number;
		readonly bytes?: number;
		readonly pieceBytes?: number;
	} = {},
): Generator<Uint8Array> {
	const begin = range.begin ?? 0;
	const total = range.bytes ?? bytesOfType(typeOf(store, name)) - begin;
	const buffer = new Uint8Array(Math.min(total, range.pieceBytes ?? PIECE));
	for (let offset = 0; offset < total; ) {
		const piece = buffer.subarray(0, Math.min(buffer.byteLength, total - offset));
		store.readInto(name, begin + offset, piece);
		yield piece;
		offset += piece.byteLength;
	}
}

/** The tensors of a store that `wanted` accepts; disposing it disposes the whole. */
export function selectTensors(store: TensorStore, wanted: (name: string) => boolean): TensorStore {
	return {
		path: store.path,
		tensors: new Map([...store.tensors].filter(([name]) => wanted(name))),
		originsOf: (name) => [{ store, name }],
		readInto: (name, offset, into) => store.readInto(name, offset, into),
		[Symbol.dispose]: () => store[Symbol.dispose](),
	};
}

/** Several stores with different tensors as one; disposing it disposes them. */
export function joinStores(path: string, stores: readonly TensorStore[]): TensorStore {
	const home = new Map(stores.flatMap((store) => [...store.tensors.keys()].map((name) => [name, store] as const)));
	return {
		path,
		tensors: new Map([...home].map(([name, store]) => [name, store.tensors.get(name)!])),
		originsOf: (name) => [{ store: home.get(name)!, name }],
		readInto: (name, offset, into) => {
			const store = home.get(name);
			if (!store) throw new UserError(`${path} has no tensor ${name}.`);
			store.readInto(name, offset, into);
		},
		[Symbol.dispose]: () => {
			for (const store of stores) store[Symbol.dispose]();
		},
	};
}
