/**
 * Storage types of checkpoints, spelled as safetensors spells them: their size, their PyTorch names and the typed array
 * their values arrive in. bf16 and f16 arrive as their bits (Uint16Array), bool and fp8 as bytes.
 */

export type TensorArray =
	| Float64Array
	| Float32Array
	| Uint8Array
	| Int8Array
	| Uint16Array
	| Int16Array
	| Uint32Array
	| Int32Array
	| BigUint64Array
	| BigInt64Array;

type ArrayConstructor = new (buffer: ArrayBuffer, byteOffset?: number, length?: number) => TensorArray;

interface DtypeDescription {
	readonly bits: number;
	/** Attribute of the `torch` module. */
	readonly torch: string;
	/** Legacy storage class of `torch`; null where torch.save uses untyped storage (_rebuild_tensor_v3). */
	readonly storage: string | null;
	/** Array of the values; complex numbers and sub-byte types arrive as their parts or bytes. */
	readonly array: ArrayConstructor;
}

/** Source: docs/spec/checkpoint.md §1.5. */
export const dtypes = {
	F64: { bits: 64, torch: "float64", storage: "DoubleStorage", array: Float64Array },
	F32: { bits: 32, torch: "float32", storage: "FloatStorage", array: Float32Array },
	F16: { bits: 16, torch: "float16", storage: "HalfStorage", array: Uint16Array },
	BF16: { bits: 16, torch: "bfloat16", storage: "BFloat16Storage", array: Uint16Array },
	I64: { bits: 64, torch: "int64", storage: "LongStorage", array: BigInt64Array },
	I32: { bits: 32, torch: "int32", storage: "IntStorage", array: Int32Array },
	I16: { bits: 16, torch: "int16", storage: "ShortStorage", array: Int16Array },
	I8: { bits: 8, torch: "int8", storage: "CharStorage", array: Int8Array },
	U64: { bits: 64, torch: "uint64", storage: null, array: BigUint64Array },
	U32: { bits: 32, torch: "uint32", storage: null, array: Uint32Array },
	U16: { bits: 16, torch: "uint16", storage: null, array: Uint16Array },
	U8: { bits: 8, torch: "uint8", storage: "ByteStorage", array: Uint8Array },
	BOOL: { bits: 8, torch: "bool", storage: "BoolStorage", array: Uint8Array },
	F8_E4M3: { bits: 8, torch: "float8_e4m3fn", storage: null, array: Uint8Array },
	F8_E5M2: { bits: 8, torch: "float8_e5m2", storage: null, array: Uint8Array },
	F8_E8M0: { bits: 8, torch: "float8_e8m0fnu", storage: null, array: Uint8Array },
	F8_E4M3FNUZ: { bits: 8, torch: "float8_e4m3fnuz", storage: null, array: Uint8Array },
	F8_E5M2FNUZ: { bits: 8, torch: "float8_e5m2fnuz", storage: null, array: Uint8Array },
	F4: { bits: 4, torch: "float4_e2m1fn_x2", storage: null, array: Uint8Array },
	C64: { bits: 64, torch: "complex64", storage: "ComplexFloatStorage", array: Float32Array },
} as const satisfies Record<string, DtypeDescription>;

export type DtypeTag = keyof typeof dtypes;

export function isDtypeTag(name: unknown): name is DtypeTag {
	return typeof name === "string" && Object.hasOwn(dtypes, name);
}

/** Floating-point kinds between which values may be converted. */
export function isFloatDtype(dtype: DtypeTag): boolean {
	return dtype === "F64" || dtype === "F32" || dtype === "F16" || dtype === "BF16";
}

/**
 * Bytes of a dense tensor, or null if their number is not a safe integer (or not whole). Checked step by step, so that
 * no product can wrap or lose digits.
 */
export function tensorBytes(dtype: DtypeTag, shape: readonly number[]): number | null {
	const elements = elementCount(shape);
	if (elements === null) return null;
	const bits = elements * dtypes[dtype].bits;
	return Number.isSafeInteger(bits) && bits % 8 === 0 ? bits / 8 : null;
}

/** Number of elements of a shape, or null if it is not a safe integer. A shape with a zero has no elements. */
export function elementCount(shape: readonly number[]): number | null {
	if (shape.includes(0)) return 0;
	let elements = 1;
	for (const size of shape) {
		elements *= size;
		if (!Number.isSafeInteger(elements)) return null;
	}
	return elements;
}

/** The values in `bytes` (8-byte aligned at its start, as every fresh buffer is) as the array of their dtype. */
export function viewAs(dtype: DtypeTag, bytes: Uint8Array): TensorArray {
	const { array } = dtypes[dtype];
	if (array === Uint8Array) return bytes;
	const size = (array as unknown as { BYTES_PER_ELEMENT: number }).BYTES_PER_ELEMENT;
	return new (array as ArrayConstructor)(bytes.buffer as ArrayBuffer, bytes.byteOffset, bytes.byteLength / size);
}

/** The bytes of any typed array, without a copy. */
export function bytesOf(values: ArrayBufferView): Uint8Array {
	return new Uint8Array(values.buffer as ArrayBuffer, values.byteOffset, values.byteLength);
}

// Values of one floating-point dtype as another, rounded to nearest, ties to even (docs/spec/checkpoint.md §6.4).

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
