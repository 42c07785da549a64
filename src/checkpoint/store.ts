/** The interface of every open checkpoint format: named dense tensors that are read by ranges of their bytes. */
import { UserError } from "../system/errors.ts";
import {
	type DtypeTag,
	decodeFloats,
	dtypes,
	elementCount,
	encodeFloats,
	firstNotFinite,
	type TensorArray,
	tensorBytes,
	viewAs,
} from "./dtype.ts";

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

/** The stored tensors that a tensor is made of, behind all mappings, and their stores. */
export function sourcesOf(store: TensorStore, name: string): { readonly store: TensorStore; readonly name: string }[] {
	return store.originsOf?.(name).flatMap((origin) => sourcesOf(origin.store, origin.name)) ?? [{ store, name }];
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

// Tensors made of some rows and columns of other tensors, in any order: slices and permutations. Values are read only when they
// are asked for, whole rows of the source at a time.

/** Rows and columns that make up a tensor. */
export interface Selection {
	readonly source: string;
	/** Places along the first axis; null: all in order. */
	readonly rows: Uint32Array | null;
	/** Places along the second axis of a matrix; null: all in order. */
	readonly columns: Uint32Array | null;
}

/** Bytes of the source that are read together where columns are selected. */
const LARGEST_SPAN = 2 ** 22;

/** Owns `source`. Rows and columns that a tensor does not have are a RangeError. */
export class SelectedStore implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;

	constructor(
		readonly source: TensorStore,
		private readonly selections: ReadonlyMap<string, Selection>,
	) {
		this.tensors = new Map([...selections].map(([name, selection]) => [name, selectedType(source, selection)]));
	}

	get path(): string {
		return this.source.path;
	}

	originsOf(name: string): { store: TensorStore; name: string }[] {
		return [{ store: this.source, name: this.selections.get(name)!.source }];
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const { source, rows, columns } = this.selections.get(name)!;
		const { dtype, shape } = typeOf(this.source, source);
		const bytes = dtypes[dtype].bits / 8;
		const sourceWidth = elementCount(shape.slice(1))! * bytes;
		const width = columns === null ? sourceWidth : columns.length * bytes;
		const rowCount = rows?.length ?? shape[0] ?? 1;
		for (let done = 0; done < into.byteLength; ) {
			const row = Math.floor((offset + done) / width);
			const skip = offset + done - row * width;
			const first = rows === null ? row : rows[row]!;
			const most = Math.min(Math.ceil((skip + into.byteLength - done) / width), rowCount - row);
			let count = 1;
			while (count < most && (rows === null || rows[row + count] === first + count)) {
				if (columns !== null && (count + 1) * sourceWidth > LARGEST_SPAN) break;
				count++;
			}
			const target = into.subarray(done, Math.min(into.byteLength, done + count * width - skip));
			if (columns === null) this.source.readInto(source, first * sourceWidth + skip, target);
			else {
				const span = new Uint8Array(count * sourceWidth);
				this.source.readInto(source, first * sourceWidth, span);
				const gathered = gather(span, columns, { count, sourceWidth, bytes });
				target.set(gathered.subarray(skip, skip + target.byteLength));
			}
			done += target.byteLength;
		}
	}

	[Symbol.dispose](): void {
		this.source[Symbol.dispose]();
	}
}

function selectedType(store: TensorStore, { source, rows, columns }: Selection): TensorType {
	const { dtype, shape } = typeOf(store, source);
	if (columns !== null && shape.length !== 2) throw new RangeError(`${source} of shape [${shape}] has no columns.`);
	const most = Math.max(...[rows, columns].map((some, axis) => (largest(some) + 1) / (shape[axis] ?? 1)));
	if (most > 1) throw new RangeError(`A selection reaches past the shape [${shape}] of ${source}.`);
	const selected = shape.map((size, axis) => [rows, columns][axis]?.length ?? size);
	return { dtype, shape: selected };
}

function largest(places: Uint32Array | null): number {
	return places === null ? -1 : places.reduce((most, place) => Math.max(most, place), 0);
}

/** Columns of `count` rows side by side. */
function gather(
	span: Uint8Array,
	columns: Uint32Array,
	{ count, sourceWidth, bytes }: { readonly count: number; readonly sourceWidth: number; readonly bytes: number },
): Uint8Array {
	const gathered = new Uint8Array(count * columns.length * bytes);
	const runs = runsOf(columns);
	for (let row = 0; row < count; row++) {
		const [from, to] = [row * sourceWidth, row * columns.length * bytes];
		for (const { begin, at, length } of runs) {
			const start = from + begin * bytes;
			gathered.set(span.subarray(start, start + length * bytes), to + at * bytes);
		}
	}
	return gathered;
}

/** Columns that follow each other in source and target. */
function runsOf(columns: Uint32Array): { readonly begin: number; readonly at: number; readonly length: number }[] {
	const runs: { begin: number; at: number; length: number }[] = [];
	for (const [at, column] of columns.entries()) {
		const last = runs.at(-1);
		if (last && last.begin + last.length === column) last.length++;
		else runs.push({ begin: column, at, length: 1 });
	}
	return runs;
}

/** A store whose float tensors come as other dtypes; `dtypeOf` says which (the tensor's own: no change). */
export class ConvertedStore implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;

	constructor(
		readonly source: TensorStore,
		dtypeOf: (name: string, type: TensorType) => DtypeTag,
	) {
		this.tensors = new Map([...source.tensors].map(([name, type]) => [name, { ...type, dtype: dtypeOf(name, type) }]));
	}

	get path(): string {
		return this.source.path;
	}

	originsOf(name: string): { store: TensorStore; name: string }[] {
		return [{ store: this.source, name }];
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const from = typeOf(this.source, name).dtype;
		const to = typeOf(this, name).dtype;
		if (from === to) {
			this.source.readInto(name, offset, into);
			return;
		}
		const [fromBytes, toBytes] = [dtypes[from].bits / 8, dtypes[to].bits / 8];
		const first = Math.floor(offset / toBytes);
		const last = Math.min(Math.ceil((offset + into.byteLength) / toBytes), bytesOfType(typeOf(this, name)) / toBytes);
		const values = new Uint8Array((last - first) * fromBytes);
		this.source.readInto(name, first * fromBytes, values);
		const floats = decodeFloats(from, values);
		const encoded = encodeFloats(to, floats);
		if (to === "F16") {
			const at = firstNotFinite(to, encoded);
			if (at >= 0 && Number.isFinite(floats[at])) {
				throw new UserError(`${name} in ${this.path} holds ${floats[at]}, beyond the largest value of F16 (65504).`);
			}
		}
		const skip = offset - first * toBytes;
		into.set(encoded.subarray(skip, skip + into.byteLength));
	}

	[Symbol.dispose](): void {
		this.source[Symbol.dispose]();
	}
}
