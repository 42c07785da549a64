/**
 * Writes pickles of protocol 2 without memo, which the loaders of PyTorch and Megatron accept (docs/spec/checkpoint.md §1.3):
 * plain data, torch dtypes and sizes, and instances of named classes.
 */
import { dtypes } from "../dtype.ts";
import { Global, PythonObject, TorchDtype, Tuple } from "./values.ts";

/** A Python float, also where the value is a whole number. */
export class PythonFloat {
	constructor(readonly value: number) {}
}

/** The call `type(*args)`, which makes sizes, layouts and enumeration members. */
export class Call {
	constructor(
		readonly type: Global,
		readonly args: readonly unknown[],
	) {}
}

/** Opcodes that push one object, copied into the pickle. */
export class RawPickle {
	constructor(readonly bytes: Uint8Array) {}
}

export function torchSize(sizes: readonly number[]): Call {
	return new Call(new Global("torch", "Size"), [new Tuple(sizes)]);
}

/** An instance of a class with a dict or a tuple as state. */
export function instance(
	module: string,
	name: string,
	state?: Readonly<Record<string, unknown>> | Tuple,
): PythonObject {
	const object = new PythonObject(new Global(module, name), []);
	if (state !== undefined) object.state = state instanceof Tuple ? state : new Map(Object.entries(state));
	return object;
}

/** The pickle of a value. Whole numbers become ints; a PythonFloat becomes a float. */
export function pickle(value: unknown): Uint8Array {
	const writer = new Writer();
	writer.bytes([0x80, 2]);
	writer.value(value);
	writer.bytes([0x2e]);
	return writer.result();
}

class Writer {
	#buffer = new Uint8Array(4096);
	#length = 0;

	result(): Uint8Array {
		return this.#buffer.slice(0, this.#length);
	}

	bytes(data: ArrayLike<number>): void {
		const needed = this.#length + data.length;
		if (needed > this.#buffer.length) {
			const larger = new Uint8Array(Math.max(needed, 2 * this.#buffer.length));
			larger.set(this.#buffer.subarray(0, this.#length));
			this.#buffer = larger;
		}
		this.#buffer.set(data, this.#length);
		this.#length = needed;
	}

	value(value: unknown): void {
		if (value === null || value === undefined) this.bytes([0x4e]);
		else if (typeof value === "boolean") this.bytes([value ? 0x88 : 0x89]);
		else if (typeof value === "number") this.#number(value);
		else if (typeof value === "bigint") this.#integer(value);
		else if (typeof value === "string") this.#text(value);
		else if (value instanceof PythonFloat) this.#float(value.value);
		else if (value instanceof RawPickle) this.bytes(value.bytes);
		else if (Array.isArray(value)) this.#list(value);
		else if (value instanceof Tuple) this.#tuple(value.items);
		else if (value instanceof Map) this.#dict(value);
		else this.#named(value);
	}

	#number(value: number): void {
		if (Number.isSafeInteger(value) && !Object.is(value, -0)) this.#integer(BigInt(value));
		else this.#float(value);
	}

	#float(value: number): void {
		const bytes = new Uint8Array(9);
		bytes[0] = 0x47;
		new DataView(bytes.buffer).setFloat64(1, value, false);
		this.bytes(bytes);
	}

	#integer(value: bigint): void {
		if (value >= 0n && value < 256n) this.bytes([0x4b, Number(value)]);
		else if (value >= -(2n ** 31n) && value < 2n ** 31n) this.bytes([0x4a, ...u32(Number(value))]);
		else {
			const bytes: number[] = [];
			let rest = value;
			while (rest !== 0n && rest !== -1n) {
				bytes.push(Number(rest & 255n));
				rest >>= 8n;
			}
			// The highest bit is the sign.
			if (bytes.at(-1)! >= 128 !== value < 0n) bytes.push(value < 0n ? 255 : 0);
			if (bytes.length > 255) throw new RangeError("An integer is too long for a pickle.");
			this.bytes([0x8a, bytes.length, ...bytes]);
		}
	}

	#text(value: string): void {
		const bytes = new TextEncoder().encode(value);
		this.bytes([0x58, ...u32(bytes.length)]);
		this.bytes(bytes);
	}

	#list(items: readonly unknown[]): void {
		this.bytes([0x5d]);
		if (items.length === 0) return;
		this.bytes([0x28]);
		for (const item of items) this.value(item);
		this.bytes([0x65]);
	}

	#tuple(items: readonly unknown[]): void {
		if (items.length === 0) {
			this.bytes([0x29]);
			return;
		}
		this.bytes([0x28]);
		for (const item of items) this.value(item);
		this.bytes([0x74]);
	}

	#dict(entries: ReadonlyMap<unknown, unknown>): void {
		this.bytes([0x7d]);
		if (entries.size === 0) return;
		this.bytes([0x28]);
		for (const [key, value] of entries) {
			this.value(key);
			this.value(value);
		}
		this.bytes([0x75]);
	}

	#named(value: unknown): void {
		if (value instanceof TorchDtype) this.#global(new Global("torch", dtypes[value.tag].torch));
		else if (value instanceof Global) this.#global(value);
		else if (value instanceof Call) {
			this.#global(value.type);
			this.#tuple(value.args);
			this.bytes([0x52]);
		} else if (value instanceof PythonObject) {
			this.#global(value.type);
			this.#tuple(value.args);
			this.bytes([0x81]);
			if (value.state !== undefined) {
				this.value(value.state);
				this.bytes([0x62]);
			}
		} else throw new RangeError("A value cannot be pickled.");
	}

	#global({ module, name }: Global): void {
		this.bytes(new TextEncoder().encode(`c${module}\n${name}\n`));
	}
}

function u32(value: number): number[] {
	return [value & 255, (value >>> 8) & 255, (value >>> 16) & 255, (value >>> 24) & 255];
}
