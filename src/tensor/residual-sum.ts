/**
 * A sum of the residual stream whose values the norm that reads it first may write, in one pass over both addends: written
 * apart, the sum would be read again. The tape records the addition where it stands, so that gradients do not depend on
 * which kernel writes the values.
 */
import type { Mask } from "./column-mask.ts";
import type { Tensor } from "./tensor.ts";

/** sum = residual + mask · branch, all contiguous and of one shape and storage type. */
export interface Addends {
	readonly residual: Tensor;
	readonly branch: Tensor;
	readonly mask: Mask | null;
}

/** Addends that keep their memory until they are disposed. */
class PendingAddends implements Addends, Disposable {
	readonly residual: Tensor;
	readonly branch: Tensor;
	readonly mask: Mask | null;

	constructor({ residual, branch, mask }: Addends) {
		this.residual = residual.share();
		this.branch = branch.share();
		this.mask = mask;
	}

	[Symbol.dispose](): void {
		this.residual[Symbol.dispose]();
		this.branch[Symbol.dispose]();
	}
}

export class ResidualSum implements Disposable {
	#pending: PendingAddends | null;

	private constructor(
		/** The sum. Its values are undefined until written() returns, or until the caller of takeAddends() writes them. */
		readonly tensor: Tensor,
		pending: PendingAddends | null,
		private readonly write: (sum: Tensor, addends: Addends) => void,
	) {
		this.#pending = pending;
	}

	/** A value that is there already. */
	static of(x: Tensor): ResidualSum {
		return new ResidualSum(x.share(), null, () => {});
	}

	/** A sum (taken over) that `write` writes, if no norm does before. */
	static later(sum: Tensor, addends: Addends, write: (sum: Tensor, addends: Addends) => void): ResidualSum {
		return new ResidualSum(sum, new PendingAddends(addends), write);
	}

	/** Whether it waits for a sum with a mask. */
	get masked(): boolean {
		return this.#pending !== null && this.#pending.mask !== null;
	}

	/** The sum with its values, which stays this object's. */
	written(): Tensor {
		using pending = this.#pending;
		this.#pending = null;
		if (pending !== null) this.write(this.tensor, pending);
		return this.tensor;
	}

	/** Addends for the caller to add and write to `tensor`; null: the values are there. The caller disposes them. */
	takeAddends(): PendingAddends | null {
		const pending = this.#pending;
		this.#pending = null;
		return pending;
	}

	[Symbol.dispose](): void {
		this.#pending?.[Symbol.dispose]();
		this.tensor[Symbol.dispose]();
	}
}
