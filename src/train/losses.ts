/** Accumulates token losses and loss tokens by name over a step's microbatches, on the device. */
import type { LossName } from "../guests/guest.ts";
import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";
import { LossWeights } from "./loss-weights.ts";

/** The loss that training minimises. */
export const languageModelLoss = "lm loss";

/** The ranks that compute a module's losses. */
export interface LossOwner {
	/** All ranks of the module. */
	readonly group: Group;
	/** Whether this rank adds its losses to the totals: of ranks that hold the same tokens' losses exactly one does. */
	readonly counts: boolean;
}

/** Σ mask · loss and Σ mask, over the ranks that count. */
export interface LossTotal {
	readonly sum: number;
	readonly tokens: number;
}

/** Mean of each loss. */
export function meansOf(totals: ReadonlyMap<string, LossTotal>): Record<string, number> {
	return Object.fromEntries([...totals].map(([name, { sum, tokens }]) => [name, tokens === 0 ? 0 : sum / tokens]));
}

export class Losses implements Disposable {
	/** Σ mask · loss and Σ mask of each name, f64 [2 · names]. */
	readonly #totals: Tensor;

	constructor(
		readonly device: Device,
		/** null: no module on this rank has a loss. */
		readonly owner: LossOwner | null,
		/** The losses, equal on every rank. */
		readonly names: readonly LossName[] = [{ name: languageModelLoss }],
		/** Weights of the step's microbatches in its gradient; the totals are over tokens in every mode. */
		readonly weights: LossWeights = new LossWeights("tokens", { microbatches: 1, lanes: 1 }),
	) {
		this.#totals = Tensor.zeros(device, [2 * names.length], "f64");
	}

	/** Adds a microbatch: Σ mask_T·loss_T and Σ mask_T. */
	add(loss: Tensor, mask: Tensor, name = languageModelLoss): void {
		if (!this.owner?.counts) return;
		const at = 2 * this.names.findIndex((own) => own.name === name);
		using sum = this.#totals.columns(at, 1);
		using count = this.#totals.columns(at + 1, 1);
		this.device.run("masked_sum", { x: loss, mask, sum, count, elements: loss.elements });
	}

	/** Totals over the owner's ranks; its first rank then holds them for totals(). Waits for the device. */
	totalsOfOwner({ group }: LossOwner): ReadonlyMap<string, LossTotal> {
		const totals = this.totals(group);
		if (group.rank !== 0) this.device.setZero(this.#totals, this.#totals.bytes);
		return totals;
	}

	/** Totals over all ranks by name; waits for the device. */
	totals(world: Group): ReadonlyMap<string, LossTotal> {
		world.allReduce(this.#totals).wait();
		const values = new Float64Array(2 * this.names.length);
		this.device.copyToHost(values, this.#totals);
		return new Map(this.names.map(({ name }, at) => [name, { sum: values[2 * at]!, tokens: values[2 * at + 1]! }]));
	}

	[Symbol.dispose](): void {
		this.#totals[Symbol.dispose]();
	}
}
