/** Shared by the cases of cuda.ts: the type of a case, its tensors, the model's sizes. */
import { Dtype } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";

export interface Case {
	readonly operation: string;
	readonly shape: string;
	/** Floating-point operations, or bytes moved. */
	readonly work: number;
	readonly unit: "TFLOP/s" | "TB/s";
	/** Bytes that a product moves at least, where they weigh. */
	readonly bytes?: number;
	readonly run: () => void;
}

export const tokens = 8192;
export const hidden = 2688;

/** Random tensors of a suite, released with it. */
export class Tensors {
	readonly #stack = new DisposableStack();
	#seed = 1;

	constructor(readonly device: Device) {}

	random(shape: readonly number[], dtype: FloatDtype = "bf16", scale = 1): Tensor {
		const tensor = this.#stack.use(Tensor.empty(this.device, shape, dtype));
		this.device.run("philox_fill", {
			y: tensor,
			rows: 1,
			width: tensor.elements,
			first_row: 0,
			first_column: 0,
			full_width: tensor.elements,
			seed: this.#seed++,
			a: 0,
			b: scale,
			distribution: 1,
			dtype: Dtype[dtype],
		});
		return tensor;
	}

	integers(values: Int32Array): Tensor {
		return this.#stack.use(Tensor.from(this.device, values));
	}

	/** Released with the suite. */
	own<T extends Disposable>(value: T): T {
		return this.#stack.use(value);
	}

	[Symbol.dispose](): void {
		this.#stack.dispose();
	}
}

/** The part of a bf16 tensor that begins at a column of its first row. */
export function fromColumn(tensor: Tensor, column: number) {
	return { allocation: tensor.allocation, byteOffset: tensor.byteOffset + 2 * column };
}
