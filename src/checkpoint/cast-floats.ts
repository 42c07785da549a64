/** Values of one floating-point dtype as another, rounded to nearest, ties to even (docs/spec/checkpoint.md §6.4). */
import { type DtypeTag, dtypes, viewAs } from "./dtype.ts";
import { bytesOfType, type TensorStore, type TensorType, typeOf } from "./store.ts";

const scratch = new Float32Array(1);
const scratchBits = new Uint32Array(scratch.buffer);

/** bf16 bits of a number; NaN stays NaN. */
function bf16Bits(value: number): number {
	scratch[0] = value;
	let bits = scratchBits[0]!;
	const rounded = scratch[0]!;
	if (rounded !== value && !Number.isNaN(value) && (bits & 1) === 0 && Number.isFinite(rounded)) {
		// Rounded twice a tie could fall the wrong way: keep a trace of what float32 dropped.
		bits = Math.abs(rounded) < Math.abs(value) ? bits | 1 : bits - 1;
	}
	if (Number.isNaN(value)) return (bits >>> 16) | 0x40;
	return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

/** The numbers of a float array in any float dtype. */
export function decodeFloats(dtype: DtypeTag, bytes: Uint8Array): Float64Array | Float32Array | Float16Array {
	const values = viewAs(dtype, bytes);
	if (values instanceof Float64Array || values instanceof Float32Array) return values;
	const bits = values as Uint16Array;
	if (dtype === "F16") return new Float16Array(bits.buffer as ArrayBuffer, bits.byteOffset, bits.length);
	const wide = new Uint32Array(bits.length);
	for (let i = 0; i < bits.length; i++) wide[i] = bits[i]! << 16;
	return new Float32Array(wide.buffer);
}

/** Exponent bits of a value of 16 or 32 bits. An infinity and a NaN have them all set. */
const exponents: Partial<Record<DtypeTag, number>> = { F32: 0x7f800000, BF16: 0x7f80, F16: 0x7c00 };

/** Index of the first infinite value or NaN among whole float values; -1 where all are finite. */
export function firstNotFinite(dtype: DtypeTag, bytes: Uint8Array): number {
	const exponent = exponents[dtype];
	if (exponent === undefined) {
		return dtype === "F64" ? decodeFloats(dtype, bytes).findIndex((value) => !Number.isFinite(value)) : -1;
	}
	const size = dtypes[dtype].bits / 8;
	const aligned = bytes.byteOffset % size === 0 ? bytes : bytes.slice();
	const words = size === 4 ? Uint32Array : Uint16Array;
	const bits = new words(aligned.buffer as ArrayBuffer, aligned.byteOffset, Math.floor(aligned.byteLength / size));
	for (let i = 0; i < bits.length; i++) if ((bits[i]! & exponent) === exponent) return i;
	return -1;
}

/** Numbers as the bytes of a float dtype. */
export function encodeFloats(dtype: DtypeTag, values: Float64Array | Float32Array | Float16Array): Uint8Array {
	let encoded: ArrayBufferView;
	if (dtype === "BF16") {
		const bits = new Uint16Array(values.length);
		for (let i = 0; i < bits.length; i++) bits[i] = bf16Bits(values[i]!);
		encoded = bits;
	} else if (dtype === "F16") encoded = Float16Array.from(values);
	else encoded = dtype === "F64" ? Float64Array.from(values) : Float32Array.from(values);
	return new Uint8Array(encoded.buffer as ArrayBuffer, encoded.byteOffset, encoded.byteLength);
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
		const encoded = encodeFloats(to, decodeFloats(from, values));
		const skip = offset - first * toBytes;
		into.set(encoded.subarray(skip, skip + into.byteLength));
	}

	[Symbol.dispose](): void {
		this.source[Symbol.dispose]();
	}
}
