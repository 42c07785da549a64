/** Sums of token losses and numbers of loss tokens over the microbatches of a step, by name, kept on the device. */
import type { Microbatch } from "../data/microbatch.ts";
import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/group.ts";
import { Tensor } from "../tensor/tensor.ts";

/** The loss that a training minimises, and whose tokens gradients are divided by. */
export const languageModelLoss = "lm loss";

/** Of an elastic model: a token's distance from its microbatch's budget (docs/spec/elastic.md §8, §12). */
export const budgetLossName = "budget loss";
/** A token's divergence from the teacher (docs/spec/elastic.md §11). */
export const distillationLossName = "logits distillation loss";
/** Name of the divergence from the teacher of the microbatches at a budget. */
export function distillationLossOf(budget: number): string {
	return `${distillationLossName} ${budget.toFixed(3)}`;
}
/** The language model's loss of microbatches at the parent's budget, and at any other. */
export const elasticLosses = { parent: "lm loss (full)", other: "lm loss (budget)" } as const;

/** Whether evaluations leave the loss out. */
export function isTrainingOnlyLoss(name: string): boolean {
	return name === budgetLossName || isBudgetLoss(name);
}

/** Whether a step may have no microbatch that the loss is of. */
export function isBudgetLoss(name: string): boolean {
	return Object.values<string>(elasticLosses).includes(name) || name.startsWith(distillationLossName);
}

/** The ranks that together compute a module's losses. */
export interface LossOwner {
	/** All ranks of the module. */
	readonly group: Group;
	/** Whether this rank's losses count: of ranks that hold the same tokens' losses only one does. */
	readonly counts: boolean;
}

/** The sum of the loss weights of all tokens of a microbatch. */
export function lossTokens({ lossMask }: Pick<Microbatch, "lossMask">): number {
	return lossMask.reduce((sum, weight) => sum + weight, 0);
}

/** Σ loss and Σ mask over all that count. */
export interface LossTotal {
	readonly sum: number;
	readonly tokens: number;
}

/** The mean of every loss by name. */
export function meansOf(totals: ReadonlyMap<string, LossTotal>): Record<string, number> {
	return Object.fromEntries([...totals].map(([name, { sum, tokens }]) => [name, tokens === 0 ? 0 : sum / tokens]));
}

export class Losses implements Disposable {
	/** Σ loss, Σ mask of every name; f64 [2 · names]. */
	readonly #totals: Tensor;

	constructor(
		readonly device: Device,
		/** null: this rank's modules have no loss. */
		readonly owner: LossOwner | null,
		/** Names of the losses, equal on every rank. */
		readonly names: readonly string[] = [languageModelLoss],
	) {
		this.#totals = Tensor.zeros(device, [2 * names.length], "f64");
	}

	/** Adds a microbatch: Σ mask_T·loss_T and Σ mask_T. */
	add(loss: Tensor, mask: Tensor, name = languageModelLoss): void {
		if (!this.owner?.counts) return;
		const at = 2 * this.names.indexOf(name);
		using sum = this.#totals.columns(at, 1);
		using count = this.#totals.columns(at + 1, 1);
		this.device.run("masked_sum", { x: loss, mask, sum, count, elements: loss.elements });
	}

	/** Adds a loss that all tokens of a microbatch share; nothing where no loss has that name. */
	addShared(value: number, tokens: number, name: string): void {
		if (!this.names.includes(name)) return;
		using loss = Tensor.from(this.device, Float32Array.of(value));
		using mask = Tensor.from(this.device, Float32Array.of(tokens));
		this.add(loss, mask, name);
	}

	/** Totals over the ranks of their owner, whose first rank holds them from now on for totals over more. Waits. */
	totalsOfOwner({ group }: LossOwner): ReadonlyMap<string, LossTotal> {
		const totals = this.totals(group);
		if (group.rank !== 0) this.device.setZero(this.#totals, this.#totals.bytes);
		return totals;
	}

	/** Totals over every rank by name; waits for the device. */
	totals(world: Group): ReadonlyMap<string, LossTotal> {
		world.allReduce(this.#totals).wait();
		const values = new Float64Array(2 * this.names.length);
		this.device.copyToHost(values, this.#totals);
		return new Map(this.names.map((name, at) => [name, { sum: values[2 * at]!, tokens: values[2 * at + 1]! }]));
	}

	[Symbol.dispose](): void {
		this.#totals[Symbol.dispose]();
	}
}
