/**
 * Values of a pickle. None, bool, int, float and str become JavaScript values (an int beyond 2^53 a bigint), bytes a
 * Uint8Array, list an Array, dict a Map, set a Set. All other values are the classes of this file, which only hold data.
 */
import type { DtypeTag } from "../dtype.ts";

/** A class or function named by a pickle. */
export class Global {
	constructor(
		readonly module: string,
		readonly name: string,
	) {}

	toString(): string {
		return `${this.module}.${this.name}`;
	}
}

export class Tuple {
	constructor(readonly items: readonly unknown[]) {}
}

/** An instance of an allowed class, as data. */
export class PythonObject {
	/** The argument of __setstate__; undefined without BUILD. */
	state: unknown = undefined;
	/** Entries of a dict subclass; null if no entry was set. */
	entries: Map<unknown, unknown> | null = null;
	/** Items of a list subclass; null if no item was added. */
	items: unknown[] | null = null;

	constructor(
		readonly type: Global,
		/** Arguments of its constructor. */
		readonly args: readonly unknown[],
	) {}

	/** An attribute of the instance (its dict or its slots), or undefined. */
	attribute(name: string): unknown {
		const places = this.state instanceof Tuple && this.state.items.length === 2 ? this.state.items : [this.state];
		for (const place of places) if (place instanceof Map && place.has(name)) return place.get(name);
		return undefined;
	}
}

/** A torch dtype used as a value. */
export class TorchDtype {
	constructor(readonly tag: DtypeTag) {}
}

/** Storage of a torch.save archive: record data/<key>. */
export class StorageReference {
	constructor(
		/** null: an untyped storage. */
		readonly dtype: DtypeTag | null,
		readonly key: string,
		/** Elements, or bytes of an untyped storage. */
		readonly length: number,
	) {}
}

/** A strided view of a storage; offset and strides in elements. */
export class TensorReference {
	constructor(
		readonly storage: StorageReference,
		readonly dtype: DtypeTag,
		readonly offset: number,
		readonly shape: readonly number[],
		readonly strides: readonly number[],
	) {}
}

/** A numpy dtype; `code` is without the byte order, such as "u4". */
export class NumpyDtype {
	bigEndian = false;
	constructor(readonly code: string) {}
}

export class NumpyArray {
	shape: readonly number[] = [];
	dtype: NumpyDtype | null = null;
	fortranOrder = false;
	data: Uint8Array | readonly unknown[] = new Uint8Array(0);
}
