/**
 * The all-gather token dispatcher, for dispatch groups of few ranks: every rank receives the rows of all ranks, permutes the rows
 * of its experts, and sums the experts' outputs by token; the partial sums are then reduce-scattered. Each rank's partial sum,
 * and its gradient, is rounded before it is added.
 */

import {
	type ExchangeMembers,
	type Gathering,
	type StartedExchange,
	startGather,
	startSum,
	tokensOfAnyMember,
} from "../../../parallel/index.ts";
import {
	type E4m3Form,
	ExpertOrder,
	nodeExperts,
	type Routing,
	type Tape,
	type Tensor,
	tokenNodes,
} from "../../../tensor/index.ts";
import type { ExpertRows, TokenDispatcher } from "./dispatcher.ts";
import { LocalDispatcher } from "./local.ts";

export class AllGatherDispatcher implements TokenDispatcher {
	readonly #tokens: number;
	readonly #gathering: Gathering;
	readonly #coming: StartedExchange;
	#local: LocalDispatcher | null = null;
	#returning: StartedExchange | null = null;

	constructor(
		private readonly tape: Tape,
		u: Tensor,
		routing: Pick<Routing, "expertIndex" | "probabilities">,
		private readonly parallel: ExchangeMembers,
		/** The e4m3 form in which experts read rows; null: they read no e4m3. */
		private readonly inE4m3: E4m3Form | null,
	) {
		const { group, expertTensor, localExperts } = parallel;
		this.#tokens = u.rows;
		this.#gathering = { group, rows: tokensOfAnyMember(tape, { tokens: u.rows }, parallel) };
		const found = tokenNodes(tape, routing, { nodes: group.size / expertTensor, nodeExperts: localExperts });
		found.nodeIndex[Symbol.dispose]();
		using beside = found.routing;
		this.#coming = startGather(tape, { rows: u, beside }, this.#gathering);
	}

	finishDispatch(): ExpertRows {
		const { tape, parallel } = this;
		const { group, expertTensor, localExperts: experts } = parallel;
		const { rows, beside } = this.#coming.finish();
		using come = rows;
		using routing = beside!;
		const firstExpert = Math.floor(group.rank / expertTensor) * experts;
		const chosen = nodeExperts(tape, routing, { rowCount: null, firstExpert, experts });
		using expertIndex = chosen.expertIndex;
		using probabilities = chosen.probabilities;
		const order = ExpertOrder.of(tape.device, expertIndex, experts);
		this.#local = new LocalDispatcher(tape, come, { probabilities }, order, this.inE4m3);
		return this.#local.finishDispatch();
	}

	startCombine(outputs: Tensor): void {
		this.#local!.startCombine(outputs);
		using sums = this.#local!.finishCombine();
		this.#returning = startSum(this.tape, sums, this.#tokens, this.#gathering);
	}

	finishCombine(): Tensor {
		return this.#returning!.finish().rows;
	}

	[Symbol.dispose](): void {
		for (const owned of [this.#coming, this.#local, this.#returning]) owned?.[Symbol.dispose]();
	}
}
