/**
 * Sparse matrix times dense rows: interpolated positions (docs/spec/vision.md §1.4), class tokens put in and taken out
 * (§2.3), pixel shuffle (§2.4) and image rows at their tokens (§4.1) are all such products, and their gradients too.
 */
import type { Device } from "../../native/device.ts";
import { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, copyInto, elementCount, Tensor } from "../tensor.ts";

/** Compressed rows on the host. */
export interface SparseRows {
	readonly columns: number;
	/** [rows + 1]: entries of row r are offsets[r] .. offsets[r + 1] − 1. */
	readonly offsets: Int32Array;
	/** Column of every entry. */
	readonly column: Int32Array;
	/** Value of every entry; null: all 1. */
	readonly value: Float32Array | null;
}

/** A sparse matrix whose entries are made on demand: a counting device needs its sizes only. */
export interface SparseOutline {
	readonly rows: number;
	readonly columns: number;
	readonly entries: number;
	/** Whether entries have values; otherwise all are 1. */
	readonly weighted: boolean;
	readonly make: () => SparseRows;
}

/** The matrix whose row r picks row `picked[r]` of `columns` rows; −1 gives a zero row. */
export function pickRows(picked: ArrayLike<number>, columns: number): SparseRows {
	const offsets = new Int32Array(picked.length + 1);
	const column: number[] = [];
	for (let row = 0; row < picked.length; row++) {
		const from = picked[row]!;
		if (!Number.isInteger(from) || from < -1 || from >= columns)
			throw new RangeError(`There is no row ${from} to pick.`);
		if (from >= 0) column.push(from);
		offsets[row + 1] = column.length;
	}
	return { columns, offsets, column: Int32Array.from(column), value: null };
}

/** Entries of a column in the order of their rows. */
function transpose({ columns, offsets, column, value }: SparseRows): SparseRows {
	const transposedOffsets = new Int32Array(columns + 1);
	for (const c of column) transposedOffsets[c + 1]!++;
	for (let c = 0; c < columns; c++) transposedOffsets[c + 1]! += transposedOffsets[c]!;
	const next = transposedOffsets.slice();
	const rows = new Int32Array(column.length);
	const values = value && new Float32Array(column.length);
	for (let row = 0; row + 1 < offsets.length; row++) {
		for (let entry = offsets[row]!; entry < offsets[row + 1]!; entry++) {
			const at = next[column[entry]!]!++;
			rows[at] = row;
			if (values) values[at] = value![entry]!;
		}
	}
	return { columns: offsets.length - 1, offsets: transposedOffsets, column: rows, value: values };
}

/** The outline of a matrix whose entries exist. */
function outlineOf(rows: SparseRows): SparseOutline {
	const { columns, offsets, column, value } = rows;
	return { rows: offsets.length - 1, columns, entries: column.length, weighted: value !== null, make: () => rows };
}

export class SparseMatrix implements Disposable {
	readonly rows: number;
	readonly columns: number;
	readonly #outline: SparseOutline;
	readonly #offsets: Tensor;
	readonly #column: Tensor;
	readonly #value: Tensor | null;
	#transposed: SparseMatrix | null = null;

	constructor(
		readonly device: Device,
		matrix: SparseRows | SparseOutline,
	) {
		const outline = "make" in matrix ? matrix : outlineOf(matrix);
		const { rows, columns, entries, weighted } = outline;
		[this.rows, this.columns] = [rows, columns];
		if (device.counts) {
			this.#outline = outline;
			this.#offsets = Tensor.empty(device, [rows + 1], "i32", "data");
			this.#column = Tensor.empty(device, [entries], "i32", "data");
			this.#value = weighted ? Tensor.empty(device, [entries], "f32", "data") : null;
			return;
		}
		const made = outline.make();
		this.#outline = outlineOf(made);
		this.#offsets = Tensor.from(device, made.offsets);
		this.#column = Tensor.from(device, made.column);
		this.#value = made.value && Tensor.from(device, made.value);
	}

	/** The entries. */
	get host(): SparseRows {
		return this.#outline.make();
	}

	/** Made when first asked for; belongs to this matrix. */
	get transposed(): SparseMatrix {
		const { rows, columns, make } = this.#outline;
		this.#transposed ??= new SparseMatrix(this.device, {
			...this.#outline,
			rows: columns,
			columns: rows,
			make: () => transpose(make()),
		});
		return this.#transposed;
	}

	/** Tensors that a backward closure must keep. */
	get tensors(): readonly (Tensor | null)[] {
		return [this.#offsets, this.#column, this.#value];
	}

	/** y = A x, or y += A x. Plain kernel call, nothing recorded; y's memory is read as rows of x's width. */
	multiply(x: Tensor, y: Tensor, accumulate: boolean): void {
		this.device.run("spmm", {
			x,
			offsets: this.#offsets,
			columns: this.#column,
			values: this.#value,
			y,
			rows: this.rows,
			width: x.width,
			x_stride: x.stride,
			y_stride: x.width,
			accumulate: Number(accumulate),
			x_dtype: x.dtypeCode,
			y_dtype: y.dtypeCode,
		});
	}

	[Symbol.dispose](): void {
		for (const tensor of this.tensors) tensor?.[Symbol.dispose]();
		this.#transposed?.[Symbol.dispose]();
	}
}

/** A parameter as the rows a product reads. */
function rowsOf(tensor: Tensor, width: number): Tensor {
	return tensor.view([tensor.elements / width, width]);
}

/**
 * y = base + A x, fp32 sums, one rounding; base: default zeros. x_CW is a tensor or a parameter [.., W], y_RW of x's
 * storage type, seen as `shape` where that is given.
 */
export function spmm(
	tape: Tape,
	matrix: SparseMatrix,
	x: Tensor | Parameter,
	options: { readonly base?: Tensor; readonly shape?: readonly number[] } = {},
): Tensor {
	const { device } = tape;
	const { base } = options;
	const value = x instanceof Parameter ? x.value : x;
	const width = value.width;
	const shape = options.shape ?? [matrix.rows, width];
	if (value.rows !== matrix.columns || elementCount(shape) !== matrix.rows * width) {
		throw new RangeError(`A sparse [${matrix.rows}, ${matrix.columns}] cannot turn [${value.shape}] into [${shape}].`);
	}
	const trainable = x instanceof Parameter ? x.trainable : x.gradient !== null;
	const wanted = trainable || (base?.gradient ?? null) !== null;
	const y = tape.output(Tensor.empty(device, shape, value.dtype), wanted);
	if (base) copyInto(base, y);
	using rows = rowsOf(value, width);
	matrix.multiply(rows, y, base !== undefined);
	if (!tape.recording || !wanted) return y;
	const transposed = trainable ? matrix.transposed : null;
	tape.record({
		name: "spmm",
		outputs: [y],
		keep: transposed?.tensors ?? [],
		parameters: [x instanceof Parameter ? x : null],
		backward: ([gradient]) => {
			using packed = contiguous(gradient!);
			using dy = rowsOf(packed, width);
			base?.gradient?.accumulate(gradient!.share());
			if (x instanceof Parameter) {
				if (!x.trainable) return;
				const entries = transposed!.tensors.filter((tensor) => tensor !== null);
				tape.weightGradient([dy, ...entries], () =>
					x.addToGradient((into, accumulate) => {
						using drows = rowsOf(into, width);
						transposed!.multiply(dy, drows, accumulate);
					}),
				);
			} else if (x.gradient) {
				const dx = x.gradient.contiguousTarget();
				transposed!.multiply(dy, dx, false);
				x.gradient.accumulate(dx);
			}
		},
	});
	return y;
}
