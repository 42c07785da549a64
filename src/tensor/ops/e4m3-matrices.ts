/** Matrices rounded to e4m3 in blocks of 128 × 128 (docs/spec/moe-performance.md §1.7). */
import { Tensor } from "../tensor.ts";

const block = 128;

/**
 * Matrices [M, R, C] in e4m3. Products read both operands along the dimension that is summed, so an input gradient reads the
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
		const { device, shape } = matrices;
		const [count, rows, width] = shape as readonly [number, number, number];
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
		const [count, rows, width] = matrices.shape as readonly [number, number, number];
		this.#transposed = Tensor.empty(matrices.device, [count, width, rows], "u8", "parameter");
		this.#round(matrices);
	}

	#round(matrices: Tensor): void {
		const { values, factors } = this;
		const [count, rows, width] = matrices.shape as readonly [number, number, number];
		const sizes = { count, rows, width, dtype: matrices.dtypeCode };
		matrices.device.run("e4m3_matrices", { matrices, values, transposed: this.#transposed, factors, ...sizes });
	}

	[Symbol.dispose](): void {
		this.values[Symbol.dispose]();
		this.#transposed?.[Symbol.dispose]();
		this.factors[Symbol.dispose]();
	}
}
