/** Matrices rounded to e4m3 in blocks of 128 × 128 (docs/spec/moe-performance.md §1.7). */
import { Tensor } from "../tensor.ts";

const block = 128;

/** Matrices [M, R, C] in e4m3, in both orders, because products read both operands along the dimension that is summed. */
export class E4m3Matrices implements Disposable {
	/** Bytes [M, R, C]. */
	readonly values: Tensor;
	/** The same bytes as [M, C, R]. */
	readonly transposed: Tensor;
	/** f32 [M, blocks of R, blocks of C]: what the values of a block are multiplied by. */
	readonly factors: Tensor;

	/** Rounds f32 or bf16; on a GPU bf16, R and C multiples of 16. */
	constructor(matrices: Tensor) {
		const { device, shape } = matrices;
		const [count, rows, width] = shape as readonly [number, number, number];
		this.values = Tensor.empty(device, [count, rows, width], "u8", "parameter");
		this.transposed = Tensor.empty(device, [count, width, rows], "u8", "parameter");
		const blocks = [count, Math.ceil(rows / block), Math.ceil(width / block)];
		this.factors = Tensor.empty(device, blocks, "f32", "parameter");
		const { values, transposed, factors } = this;
		const dtype = matrices.dtypeCode;
		device.run("e4m3_matrices", { matrices, values, transposed, factors, count, rows, width, dtype });
	}

	[Symbol.dispose](): void {
		this.values[Symbol.dispose]();
		this.transposed[Symbol.dispose]();
		this.factors[Symbol.dispose]();
	}
}
