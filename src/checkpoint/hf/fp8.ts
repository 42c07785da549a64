/**
 * Weights in FP8, as DeepSeek-V3 and Qwen's FP8 folders are published, read as the bf16 that transformers makes of them: NAME
 * F8_E4M3 [.., rows, columns] times NAME_scale_inv [.., ⌈rows / R⌉, ⌈columns / C⌉], one scale a block of R × C; the product is
 * rounded to fp32, then to bf16, each time to nearest, ties to even.
 */
import { UserError } from "../../system/errors.ts";
import { type DtypeTag, decodeFloats, isFloatDtype } from "../dtype.ts";
import { bytesOfType, type TensorStore, type TensorType } from "../store.ts";

/** Rows and columns that share a scale; null: a whole matrix does. */
export type ScaledBlock = readonly [rows: number, columns: number] | null;

/** Values by their byte: sign, 4 bits of the exponent with bias 7, 3 of the mantissa; no infinities. */
const values = Float32Array.from({ length: 256 }, (_, code) => {
	const [exponent, mantissa] = [(code >> 3) & 15, code & 7];
	const magnitude = exponent === 0 ? mantissa * 2 ** -9 : (8 + mantissa) * 2 ** (exponent - 10);
	return (code & 127) === 127 ? Number.NaN : (code < 128 ? 1 : -1) * magnitude;
});

const stored: DtypeTag = "F8_E4M3";
const suffix = "_scale_inv";

/** A store of such weights as bf16. The source is the caller's. */
export class Fp8Weights implements Pick<TensorStore, "readInto"> {
	readonly tensors: ReadonlyMap<string, TensorType>;
	readonly #scaled = new Map<string, ScaledMatrix>();
	/** Scales of the tensor that was read last: a reader asks for its values in pieces. */
	#latest: { readonly name: string; readonly scales: ArrayLike<number> } | null = null;

	constructor(
		private readonly source: Pick<TensorStore, "path" | "tensors" | "readInto">,
		block: ScaledBlock,
	) {
		const tensors = new Map(source.tensors);
		for (const [name, { dtype, shape }] of source.tensors) {
			const scales = source.tensors.get(name + suffix);
			if (dtype !== stored || scales === undefined) continue;
			const matrix = scaledMatrix(shape, block);
			const { scaleRows, scaleColumns, count } = matrix;
			const fits = isFloatDtype(scales.dtype) && scales.dtype !== "F64" && shape.length >= 2;
			const sizes = block === null ? [1, 1] : [scaleRows, scaleColumns];
			const expected = [...shape.slice(0, -2), ...sizes].join();
			const scalar = count === 1 && scaleRows * scaleColumns === 1 && scales.shape.every((size) => size === 1);
			if (!fits || (scales.shape.join() !== expected && !scalar)) {
				throw new UserError(
					`${source.path}: ${name} [${shape}] ${dtype} with ${name}${suffix} [${scales.shape}] ${scales.dtype} has no scale for each block of ${block?.join(" × ") ?? "all its values"}.`,
				);
			}
			tensors.delete(name + suffix);
			tensors.set(name, { dtype: "BF16", shape });
			this.#scaled.set(name, matrix);
		}
		this.tensors = tensors;
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const matrix = this.#scaled.get(name);
		if (matrix === undefined) {
			this.source.readInto(name, offset, into);
			return;
		}
		// `into` may begin and end inside an element.
		const begin = Math.floor(offset / 2);
		const codes = new Uint8Array(Math.ceil((offset + into.byteLength) / 2) - begin);
		this.source.readInto(name, begin, codes);
		const bits = scaledBits(codes, begin, matrix, this.#scalesOf(name));
		into.set(new Uint8Array(bits.buffer, offset - 2 * begin, into.byteLength));
	}

	#scalesOf(name: string): ArrayLike<number> {
		if (this.#latest?.name !== name) {
			const type = this.source.tensors.get(name + suffix)!;
			const bytes = new Uint8Array(bytesOfType(type));
			this.source.readInto(name + suffix, 0, bytes);
			this.#latest = { name, scales: decodeFloats(type.dtype, bytes) };
		}
		return this.#latest!.scales;
	}
}

/** `count` matrices one after the other, and the sizes of their blocks and of the matrices of scales. */
interface ScaledMatrix {
	readonly count: number;
	readonly rows: number;
	readonly columns: number;
	readonly blockRows: number;
	readonly blockColumns: number;
	readonly scaleRows: number;
	readonly scaleColumns: number;
}

function scaledMatrix(shape: readonly number[], block: ScaledBlock): ScaledMatrix {
	const [rows = 1, columns = 1] = shape.slice(-2);
	const [blockRows, blockColumns] = block ?? [rows, columns];
	return {
		count: shape.slice(0, -2).reduce((product, size) => product * size, 1),
		...{ rows, columns, blockRows, blockColumns },
		scaleRows: Math.ceil(rows / blockRows),
		scaleColumns: Math.ceil(columns / blockColumns),
	};
}

/** bf16 of the elements from `begin` on. */
function scaledBits(
	codes: Uint8Array,
	begin: number,
	{ rows, columns, blockRows, blockColumns, scaleRows, scaleColumns }: ScaledMatrix,
	scales: ArrayLike<number>,
): Uint16Array<ArrayBuffer> {
	const wide = new Float32Array(codes.length);
	for (let at = 0; at < codes.length; ) {
		const row = Math.floor((begin + at) / columns);
		const column = begin + at - row * columns;
		const [matrix, blockColumn] = [Math.floor(row / rows), Math.floor(column / blockColumns)];
		const blockRow = Math.floor((row - matrix * rows) / blockRows);
		const scale = scales[(matrix * scaleRows + blockRow) * scaleColumns + blockColumn]!;
		const end = Math.min(codes.length, at + Math.min(columns, (blockColumn + 1) * blockColumns) - column);
		for (; at < end; at++) wide[at] = values[codes[at]!]! * scale;
	}
	const from = new Uint32Array(wide.buffer);
	const bits = new Uint16Array(codes.length);
	for (let i = 0; i < bits.length; i++) bits[i] = (from[i]! + 0x7fff + ((from[i]! >>> 16) & 1)) >>> 16;
	return bits;
}
