/** The all-to-all token dispatcher: a row for each of a token's experts. */
import {
	Exchange,
	type ExchangeMembers,
	type StartedExchange,
	startCombine,
	startDispatch,
} from "../../../parallel/index.ts";
import { type ExpertOrder, permute, type Routing, type Tape, type Tensor, unpermute } from "../../../tensor/index.ts";
import { type ExpertRows, expertRows, type TokenDispatcher } from "./dispatcher.ts";

/** Takes ownership of the order. */
export class AllToAllDispatcher implements TokenDispatcher {
	readonly #exchange: Exchange;
	readonly #dispatch: StartedExchange;
	#combine: StartedExchange | null = null;

	constructor(
		private readonly tape: Tape,
		u: Tensor,
		{ probabilities }: Pick<Routing, "probabilities">,
		private readonly order: ExpertOrder,
		parallel: ExchangeMembers,
		overflow: Tensor | null,
	) {
		const { rows, rowProbability } = permute(tape, u, probabilities, order);
		using sentRows = rows;
		using sentProbability = rowProbability;
		this.#exchange = Exchange.plan(tape, order, parallel, overflow);
		this.#dispatch = startDispatch(tape, { rows: sentRows, beside: sentProbability }, this.#exchange);
	}

	finishDispatch(): ExpertRows {
		const { rows, beside } = this.#dispatch.finish();
		return expertRows({ rows, inE4m3: null, rowProbability: beside!, offsets: this.#exchange.offsets });
	}

	startCombine(outputs: Tensor): void {
		this.#combine = startCombine(this.tape, outputs, this.#exchange);
	}

	finishCombine(): Tensor {
		using rows = this.#combine!.finish().rows;
		return unpermute(this.tape, rows, this.order);
	}

	[Symbol.dispose](): void {
		for (const owned of [this.#exchange, this.#dispatch, this.#combine, this.order]) owned?.[Symbol.dispose]();
	}
}
