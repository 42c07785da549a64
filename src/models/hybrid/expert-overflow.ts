/** Whether experts of this rank were sent more rows than they have room for: noted on the device, found out once a step. */
import type { Device } from "../../native/device.ts";
import { UserError } from "../../native/errors.ts";
import type { ExpertParallel } from "../../parallel/experts/members.ts";
import { Tensor } from "../../tensor/tensor.ts";
import type { RouterState } from "./router-state.ts";

export class ExpertOverflow implements Disposable {
	readonly #layers: readonly number[];
	/** i32 [layers, 2]: rows and room of the worst overflow of each layer, or zeros. */
	readonly #noted: Tensor;
	readonly #ofLayer: readonly Tensor[];

	/** Gives every router its place to note. */
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

	/** Throws a UserError that names the layer and this rank where rows had no room; waits for the device. */
	check(): void {
		const { bound } = this.parallel.capacity;
		// There is room for whatever comes.
		if (bound === null || this.#layers.length === 0) return;
		const noted = this.#noted.toInt32();
		const at = this.#layers.findIndex((_, index) => noted[2 * index]! > 0);
		if (at < 0) return;
		const [rows, room] = [noted[2 * at]!, noted[2 * at + 1]!];
		const rank = this.parallel.group.ranks[this.parallel.group.rank]!;
		const enough = Math.ceil((100 * bound * rows) / Math.max(1, room)) / 100;
		throw new UserError(
			`Layer ${this.#layers[at]}: the experts of rank ${rank} were sent ${rows} rows in one microbatch, and ` +
				`moe-expert-capacity-bound ${bound} gives room for ${room}; ${enough} would have been enough.`,
		);
	}

	[Symbol.dispose](): void {
		for (const tensor of [...this.#ofLayer, this.#noted]) tensor[Symbol.dispose]();
	}
}
