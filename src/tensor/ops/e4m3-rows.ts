/** Rows rounded to e4m3 in runs of 128 columns (docs/spec/moe-performance.md §1.7) by the operation that writes them. */
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
