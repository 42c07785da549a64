/**
 * Detects that experts of this rank were sent more rows than are reserved for them: noted on the device, read by the host once a
 * step.
 */

import type { Device } from "../../native/device.ts";
import type { ExpertParallel } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { Tensor } from "../../tensor/index.ts";
import type { RouterState } from "./router-state.ts";

export class ExpertOverflow implements Disposable {
	readonly #layers: readonly number[];
	/** i32 [layers, 2]: rows and capacity of each layer's worst overflow, zeros without one. */
	readonly #noted: Tensor;
	readonly #ofLayer: readonly Tensor[];

	/** Gives each router its row of #noted. */
	constructor(
		device: Device,
		private readonly parallel: ExpertParallel,
		routers: ReadonlyMap<number, RouterState>,
	) {
		this.#layers = [...routers.keys()];
		this.#noted = Tensor.zeros(device, [this.#layers.length, 2], "i32", "parameter");
		this.#ofLayer = this.#layers.map((_, at) => this.#noted.rowsFrom(at, 1));
		for (const [at, router] of [...routers.values()].entries()) router.overflow = this.#ofLayer[at]!;
	}

	/** Throws a UserError that names the layer and this rank if rows did not fit; waits for the device. */
	check(): void {
		const { bound } = this.parallel.capacity;
		// Without a bound every row fits.
		if (bound === null || this.#layers.length === 0) return;
		const noted = this.#noted.toInt32();
		const at = this.#layers.findIndex((_, index) => noted[2 * index]! > 0);
		if (at < 0) return;
		const [rows, room] = [noted[2 * at]!, noted[2 * at + 1]!];
		const rank = this.parallel.group.ranks[this.parallel.group.rank]!;
		const enough = Math.ceil((100 * bound * rows) / Math.max(1, room)) / 100;
		throw new UserError(
			`Layer ${this.#layers[at]}: the experts of rank ${rank} were sent ${counted(rows, "row")} in one microbatch, and ` +
				`moe-expert-capacity-bound ${bound} gives room for ${room}; ${enough} would have been enough.`,
		);
	}

	[Symbol.dispose](): void {
		for (const tensor of [...this.#ofLayer, this.#noted]) tensor[Symbol.dispose]();
	}
}
