/**
 * A tensor: a region of device memory with a shape and a dtype. Its creator owns it and disposes it (`using`); share() adds an
 * owner. Row major; a matrix may be a window into a wider one (`stride`).
 */
import { Dtype, type DtypeName, type MemoryTagName } from "../native/abi.ts";
import type { Device } from "../native/device.ts";
import type { Allocation, DeviceMemory } from "../native/memory.ts";
import type { GradientSlot } from "./gradient.ts";

export const dtypeBytes: Readonly<Record<DtypeName, number>> = { f32: 4, bf16: 2, i32: 4, u8: 1, f64: 8 };
/** Dtypes that can have gradients. */
export type FloatDtype = "f32" | "bf16";

type HostArray = Float32Array | Int32Array | Uint8Array | Float64Array | Uint16Array;

export function elementCount(shape: readonly number[]): number {
	return shape.reduce((product, size) => product * size, 1);
}

/** Whether `count` from `start` on are whole positions among `length`. */
function isRange(start: number, count: number, length: number): boolean {
	return Number.isInteger(start) && Number.isInteger(count) && start >= 0 && count >= 0 && start + count <= length;
}

export class Tensor implements DeviceMemory, Disposable {
	#disposed = false;

	private constructor(
		readonly device: Device,
		readonly allocation: Allocation,
		readonly byteOffset: number,
		readonly shape: readonly number[],
		readonly dtype: DtypeName,
		/** Elements from one row to the next; rows are runs of the last dimension. */
		readonly stride: number,
		/** Gathers this value's gradient; null: no gradient is wanted. */
		readonly gradient: GradientSlot | null,
		/** Live rows on the device (int32), when fewer than the shape may be; null: all of them. Not owned. */
		readonly rowCount: Tensor | null,
	) {}

	/** Uninitialised memory. */
	static empty(
		device: Device,
		shape: readonly number[],
		dtype: DtypeName = "f32",
		tag: MemoryTagName = "activation",
	): Tensor {
		const allocation = device.allocate(elementCount(shape) * dtypeBytes[dtype], tag);
		return new Tensor(device, allocation, 0, shape, dtype, shape.at(-1) ?? 1, null, null);
	}

	static zeros(
		device: Device,
		shape: readonly number[],
		dtype: DtypeName = "f32",
		tag: MemoryTagName = "activation",
	): Tensor {
		const tensor = Tensor.empty(device, shape, dtype, tag);
		device.setZero(tensor, tensor.bytes);
		return tensor;
	}

	/** Copies host values; the dtype follows the array unless bf16 is asked for from a Float32Array. */
	static from(
		device: Device,
		values: HostArray,
		shape: readonly number[] = [values.length],
		options: { dtype?: DtypeName; tag?: MemoryTagName } = {},
	): Tensor {
		const dtype = options.dtype ?? dtypeOf(values);
		if (values.length !== elementCount(shape)) {
			throw new RangeError(`${values.length} values do not fill a tensor of shape [${shape}].`);
		}
		const tag = options.tag ?? "data";
		if (dtype === "bf16" && values instanceof Float32Array) {
			// The device rounds a large image in a fraction of the time.
			using wide = Tensor.from(device, values, shape);
			return cast(wide, dtype, tag);
		}
		const tensor = Tensor.empty(device, shape, dtype, tag);
		device.copyToDevice(tensor, values);
		return tensor;
	}

	get elements(): number {
		return elementCount(this.shape);
	}

	get bytes(): number {
		return this.elements * dtypeBytes[this.dtype];
	}

	/** Size of the last dimension. */
	get width(): number {
		return this.shape.at(-1) ?? 1;
	}

	/** Number of runs of the last dimension. */
	get rows(): number {
		return this.width === 0 ? 0 : this.elements / this.width;
	}

	/** MIMO_DTYPE_* of this tensor. */
	get dtypeCode(): number {
		return Dtype[this.dtype];
	}

	get contiguous(): boolean {
		return this.stride === this.width || this.rows <= 1;
	}

	get disposed(): boolean {
		return this.#disposed;
	}

	/** A further owner of the same memory. */
	share(): Tensor {
		return this.#with({});
	}

	/** A further owner with another gradient slot (null: none). */
	withGradient(gradient: GradientSlot | null): Tensor {
		return this.#with({ gradient });
	}

	/** A view with another shape; rows must be contiguous. */
	view(shape: readonly number[]): Tensor {
		if (!this.contiguous || elementCount(shape) !== this.elements) {
			throw new RangeError(`A tensor of shape [${this.shape}] cannot be seen as [${shape}].`);
		}
		return this.#with({ shape, stride: shape.at(-1) ?? 1 });
	}

	/** A view of columns [start, start + count). */
	columns(start: number, count: number): Tensor {
		if (!isRange(start, count, this.width)) throw new RangeError(`No columns ${start}..${start + count}.`);
		return this.#with({
			byteOffset: this.byteOffset + start * dtypeBytes[this.dtype],
			shape: [this.rows, count],
			gradient: null,
		});
	}

	/** A view of rows [start, start + count). */
	rowsFrom(start: number, count: number): Tensor {
		if (!isRange(start, count, this.rows)) throw new RangeError(`No rows ${start}..${start + count}.`);
		return this.#with({
			byteOffset: this.byteOffset + start * this.stride * dtypeBytes[this.dtype],
			shape: [count, this.width],
			gradient: null,
		});
	}

	/** A further owner with rowCount[0] live rows (null: all are live). `rowCount` must outlive it. */
	withRowCount(rowCount: Tensor | null): Tensor {
		return this.#with({ rowCount });
	}

	/** Values on the host, widened to f32 for bf16 storage. Waits for the device. */
	toFloat32(): Float32Array {
		if (this.dtype === "f32" && this.contiguous) {
			const values = new Float32Array(this.elements);
			this.device.copyToHost(values, this);
			return values;
		}
		using wide = Tensor.empty(this.device, this.shape, "f32", "workspace");
		copyInto(this, wide);
		return wide.toFloat32();
	}

	/** Contiguous 32-bit integers on the host. */
	toInt32(): Int32Array {
		if (this.dtype !== "i32") throw new TypeError(`A ${this.dtype} tensor holds no 32-bit integers.`);
		const values = new Int32Array(this.elements);
		this.device.copyToHost(values, this);
		return values;
	}

	/** First element as a number: losses, norms, counts. Waits for the device. */
	item(): number {
		const host = { f32: Float32Array, bf16: Uint16Array, i32: Int32Array, u8: Uint8Array, f64: Float64Array };
		const value = new host[this.dtype](1);
		this.device.copyToHost(value, this);
		return this.dtype === "bf16" ? bf16ToNumber(value[0]!) : value[0]!;
	}

	[Symbol.dispose](): void {
		if (this.#disposed) throw new Error("A tensor was disposed twice.");
		this.#disposed = true;
		this.allocation.release();
	}

	#with(change: {
		byteOffset?: number;
		shape?: readonly number[];
		stride?: number;
		gradient?: GradientSlot | null;
		rowCount?: Tensor | null;
	}): Tensor {
		return new Tensor(
			this.device,
			this.allocation.retain(),
			change.byteOffset ?? this.byteOffset,
			change.shape ?? this.shape,
			this.dtype,
			change.stride ?? this.stride,
			change.gradient === undefined ? this.gradient : change.gradient,
			change.rowCount === undefined ? this.rowCount : change.rowCount,
		);
	}
}

/** to = alpha * from + beta * to, whatever the storage types and strides. */
export function axpby(from: Tensor, to: Tensor, alpha: number, beta: number): void {
	from.device.run("axpby", {
		x: from,
		y: to,
		row_count: null,
		rows: from.rows,
		width: from.width,
		x_stride: from.stride,
		y_stride: to.stride,
		alpha,
		beta,
		x_dtype: from.dtypeCode,
		y_dtype: to.dtypeCode,
	});
}

/** Copies, casting where the storage types differ. */
export function copyInto(from: Tensor, to: Tensor): void {
	axpby(from, to, 1, 0);
}

/** A contiguous copy in the wanted storage type. */
export function cast(from: Tensor, dtype: FloatDtype, tag: MemoryTagName = "activation"): Tensor {
	const to = Tensor.empty(from.device, from.shape, dtype, tag);
	copyInto(from, to);
	return to;
}

/** The value of x with its rows side by side: x itself, shared, or a copy. The caller disposes it. */
export function contiguous(x: Tensor): Tensor {
	return x.contiguous ? x.share() : cast(x, x.dtype as FloatDtype);
}

function dtypeOf(values: HostArray): DtypeName {
	if (values instanceof Float32Array) return "f32";
	if (values instanceof Int32Array) return "i32";
	if (values instanceof Uint8Array) return "u8";
	if (values instanceof Float64Array) return "f64";
	return "bf16";
}

/** Bits of the nearest bf16 of every value, ties to even. */
export function roundToBf16(values: Float32Array): Uint16Array {
	// On wrapping 32-bit integers in a plain loop, which is several times faster than the alternatives.
	const bits = new Int32Array(values.buffer, values.byteOffset, values.length);
	const rounded = new Uint16Array(values.length);
	for (let i = 0; i < bits.length; i++) {
		const b = bits[i]!;
		const isNan = (b & 0x7fffffff) > 0x7f800000;
		rounded[i] = isNan ? (b >>> 16) | 0x40 : ((b + 0x7fff + ((b >>> 16) & 1)) | 0) >>> 16;
	}
	return rounded;
}

function bf16ToNumber(bits: number): number {
	return new Float32Array(new Uint32Array([bits << 16]).buffer)[0]!;
}
