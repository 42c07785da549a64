/** Sum of token losses and number of loss tokens over the microbatches of a step, kept on the device. */
import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/group.ts";
import { Tensor } from "../tensor/tensor.ts";

export class LossAccumulator implements Disposable {
	/** Σ loss, Σ mask; f64 [2]. */
	readonly #totals: Tensor;
	/** Microbatches and tokens added here, loss tokens or not. */
	microbatches = 0;
	tokens = 0;
	/** Whether this rank encoded an image of the step. */
	sawImages = false;

	/** counts: whether this rank's losses count; of ranks that share tokens only one does. */
	constructor(
		readonly device: Device,
		readonly counts: boolean,
	) {
		this.#totals = Tensor.zeros(device, [2], "f64");
	}

	/** Adds a microbatch: Σ mask_T·loss_T and Σ mask_T. */
	add(loss: Tensor, mask: Tensor): void {
		this.microbatches++;
		this.tokens += loss.elements;
		if (!this.counts) return;
		using sum = this.#totals.columns(0, 1);
		using count = this.#totals.columns(1, 1);
		this.device.run("masked_sum", { x: loss, mask, sum, count, elements: loss.elements });
	}

	/** Totals over the ranks of `part`, of which its first holds them from now on for a total over more. Waits. */
	totalOfPart(part: Group): { sum: number; tokens: number } {
		const totals = this.total(part);
		if (part.rank !== 0) this.device.setZero(this.#totals, this.#totals.bytes);
		return totals;
	}

	/** Totals over every rank; waits for the device. */
	total(world: Group): { sum: number; tokens: number } {
		world.allReduce(this.#totals).wait();
		const values = new Float64Array(2);
		this.device.copyToHost(values, this.#totals);
		return { sum: values[0]!, tokens: values[1]! };
	}

	[Symbol.dispose](): void {
		this.#totals[Symbol.dispose]();
	}
}
