/** The token dispatcher of a rank that holds all experts: a local permutation. */
import {
	type E4m3Form,
	type ExpertOrder,
	type PermutedRows,
	permute,
	type Routing,
	type Tape,
	type Tensor,
	unpermute,
} from "../../../tensor/index.ts";
import { type ExpertRows, expertRows, type TokenDispatcher } from "./dispatcher.ts";

/** Takes ownership of the order. */
export class LocalDispatcher implements TokenDispatcher {
	/** null: finishDispatch has passed them on. */
	#permuted: PermutedRows | null;
	#outputs: Tensor | null = null;

	constructor(
		private readonly tape: Tape,
		u: Tensor,
		{ probabilities }: Pick<Routing, "probabilities">,
		private readonly order: ExpertOrder,
		/** The e4m3 form in which experts read rows; null: they read no e4m3. */
		inE4m3: E4m3Form | null,
	) {
		this.#permuted = permute(tape, u, probabilities, order, { inE4m3 });
	}

	finishDispatch(): ExpertRows {
		const permuted = this.#permuted!;
		this.#permuted = null;
		return expertRows({ ...permuted, offsets: this.order.offsets });
	}

	startCombine(outputs: Tensor): void {
		this.#outputs = outputs.share();
	}

	finishCombine(): Tensor {
		return unpermute(this.tape, this.#outputs!, this.order);
	}

	[Symbol.dispose](): void {
		const { rows, inE4m3, rowProbability } = this.#permuted ?? { rows: null, inE4m3: null, rowProbability: null };
		for (const owned of [rows, inE4m3, rowProbability, this.#outputs, this.order]) owned?.[Symbol.dispose]();
	}
}
