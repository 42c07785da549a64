/** Rows rounded to e4m3 in runs of 128 columns (docs/spec/moe-performance.md §1.7) by the operation that writes them. */
import { E4M3_SPARE_FACTORS } from "../../native/abi.ts";
import type { Device } from "../../native/device.ts";
import { Tensor } from "../tensor.ts";

const run = 128;

/** Memory of rows [R, C] in e4m3, which stands beside the rows as they are: gradients of weights read those, also where they round them otherwise. */
export class E4m3Rows implements Disposable {
	/** Bytes [R, C]. */
	readonly values: Tensor;
	/** f32: what the values of a run and row are multiplied by, [runs, R rounded up to 4], and room that kernels read. */
	readonly factors: Tensor;

	constructor(device: Device, rows: number, columns: number) {
		this.values = Tensor.empty(device, [rows, columns], "u8");
		const count = Math.ceil(columns / run) * Math.ceil(rows / 4) * 4;
		this.factors = Tensor.empty(device, [count + E4M3_SPARE_FACTORS], "f32");
	}

	[Symbol.dispose](): void {
		this.values[Symbol.dispose]();
		this.factors[Symbol.dispose]();
	}
}
