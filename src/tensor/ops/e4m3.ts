/** Rows and matrices rounded to e4m3 (docs/spec/moe-performance.md §1.7): rows in runs of 128 columns by the operation that writes them. */
import { E4M3_SPARE_FACTORS } from "../../native/abi.ts";
import type { Device } from "../../native/device.ts";
import { Tensor } from "../tensor.ts";

const run = 128;

/** How rows in e4m3 are stored: beside the unrounded rows, or alone. */
export type E4m3Form = "beside" | "alone";

/** Memory of rows [R, C] in e4m3. */
export class E4m3Rows implements Disposable {
	/** Bytes [R, C]. */
	readonly values: Tensor;
	/** f32 [runs, R rounded up to 4]: the factor of each run of a row, and padding that kernels read. */
	readonly factors: Tensor;

	constructor(device: Device, rows: number, columns: number) {
		this.values = Tensor.empty(device, [rows, columns], "u8");
		const count = Math.ceil(columns / run) * Math.ceil(rows / 4) * 4;
		this.factors = Tensor.empty(device, [count + E4M3_SPARE_FACTORS], "f32");
	}

	/** x [R, C], f32 or bf16, rounded; rows from rowCount[0] on are left alone. On a GPU bf16, C a multiple of 16. */
	static of(x: Tensor, rowCount: Tensor): E4m3Rows {
		const inE4m3 = new E4m3Rows(x.device, x.rows, x.width);
		const { values, factors } = inE4m3;
		const sizes = { rows: x.rows, width: x.width, dtype: x.dtypeCode };
		x.device.run("e4m3_rows", { x, row_count: rowCount, values, factors, ...sizes });
		return inE4m3;
	}

	/** The tensors that a backward pass keeps to read the rows. */
	get tensors(): readonly Tensor[] {
		return [this.values, this.factors];
	}

	[Symbol.dispose](): void {
		this.values[Symbol.dispose]();
		this.factors[Symbol.dispose]();
	}
}

// Matrices rounded to e4m3 in blocks of 128 × 128 (docs/spec/moe-performance.md §1.7).

const block = 128;

/** The shape of a stack of matrices; a single matrix [R, C] is a stack of one. */
function stackShape({ shape }: Tensor): readonly [count: number, rows: number, width: number] {
	const [count, rows, width] = shape.length === 2 ? [1, ...shape] : shape;
	return [count!, rows!, width!];
}

/**
 * Matrices [M, R, C], or one [R, C], in e4m3. Products read both operands along the dimension that is summed, so an input gradient reads the
 * same bytes in the other order; forward passes that no backward follows do without that.
 */
export class E4m3Matrices implements Disposable {
	/** Bytes [M, R, C]. */
	readonly values: Tensor;
	/** f32 [M, blocks of R, blocks of C]: factor of the values of a block. */
	readonly factors: Tensor;
	#transposed: Tensor | null = null;

	/** Rounds f32 or bf16; on a GPU bf16, R and C multiples of 16. `transposed`: in both orders. */
	constructor(matrices: Tensor, { transposed }: { readonly transposed: boolean }) {
		const { device } = matrices;
		const [count, rows, width] = stackShape(matrices);
		this.values = Tensor.empty(device, [count, rows, width], "u8", "parameter");
		const blocks = [count, Math.ceil(rows / block), Math.ceil(width / block)];
		this.factors = Tensor.empty(device, blocks, "f32", "parameter");
		if (transposed) this.transpose(matrices);
		else this.#round(matrices);
	}

	/** The bytes as [M, C, R]; null: they were not asked for. */
	get transposed(): Tensor | null {
		return this.#transposed;
	}

	/** Adds the other order, of the matrices that were rounded. */
	transpose(matrices: Tensor): void {
		const [count, rows, width] = stackShape(matrices);
		this.#transposed = Tensor.empty(matrices.device, [count, width, rows], "u8", "parameter");
		this.#round(matrices);
	}

	#round(matrices: Tensor): void {
		const { values, factors } = this;
		const [count, rows, width] = stackShape(matrices);
		const sizes = { count, rows, width, dtype: matrices.dtypeCode };
		matrices.device.run("e4m3_matrices", { matrices, values, transposed: this.#transposed, factors, ...sizes });
	}

	[Symbol.dispose](): void {
		this.values[Symbol.dispose]();
		this.#transposed?.[Symbol.dispose]();
		this.factors[Symbol.dispose]();
	}
}
