/**
 * Values of a pickle. None, bool, int, float and str are JavaScript's own (an int beyond 2^53 is a bigint), bytes a
 * Uint8Array, list an Array, dict a Map, set a Set. The rest are the classes here: descriptions, never behaviour.
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

/** An instance of an allowed class that this program needs no behaviour of. */
export class PythonObject {
	/** The argument of __setstate__; undefined without BUILD. */
	state: unknown = undefined;
	/** Entries of a dict subclass; null if none were set. */
	entries: Map<unknown, unknown> | null = null;
	/** Items of a list subclass; null if none were added. */
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
		/** null: untyped, measured in bytes. */
		readonly dtype: DtypeTag | null,
		readonly key: string,
		/** Elements, or bytes when untyped. */
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

/** numpy's dtype: its code without byte order ("u4"), and whether it is big-endian. */
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
