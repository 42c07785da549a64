/**
 * The hierarchical token dispatcher (--moe-token-dispatcher-type flex, docs/spec/moe-performance.md §2.3), as in HybridEP and
 * DeepEP: a token's row is sent once to each node that holds any of its experts, to the member there at this rank's position, and
 * is copied to its experts inside the node. On the way back the node sums a token's outputs and returns one row, with one more
 * rounding; gradients take the same paths.
 */
import {
	Exchange,
	type ExchangeMembers,
	type ExpertNodes,
	type StartedExchange,
	startCombine,
	startDispatch,
} from "../../../parallel/index.ts";
import {
	type E4m3Form,
	ExpertOrder,
	nodeExperts,
	permuteRows,
	type Routing,
	type Tape,
	type Tensor,
	tokenNodes,
	unpermute,
} from "../../../tensor/index.ts";
import { AllToAllDispatcher } from "./all-to-all.ts";
import type { ExpertRows, TokenDispatcher } from "./dispatcher.ts";
import { LocalDispatcher } from "./local.ts";

export class HierarchicalDispatcher implements TokenDispatcher {
	/** Tokens sorted by node: nodes are to the exchange between nodes what experts are to the exchange inside a node. */
	readonly #byNode: ExpertOrder;
	readonly #between: Exchange;
	readonly #coming: StartedExchange;
	/** The dispatcher inside this node, from the members that received rows to the experts. */
	#within: TokenDispatcher | null = null;
	#returning: StartedExchange | null = null;

	constructor(
		private readonly tape: Tape,
		u: Tensor,
		routing: Pick<Routing, "expertIndex" | "probabilities">,
		private readonly parallel: ExchangeMembers & { readonly nodes: ExpertNodes },
		private readonly overflow: Tensor | null,
		/** The e4m3 form in which experts read rows; null: they read no e4m3. */
		private readonly inE4m3: E4m3Form | null,
	) {
		const { between } = parallel.nodes;
		const found = tokenNodes(tape, routing, { nodes: between.size, nodeExperts: this.#nodeExperts });
		using nodeIndex = found.nodeIndex;
		using routed = found.routing;
		this.#byNode = ExpertOrder.of(tape.device, nodeIndex, between.size);
		const [rows, beside] = permuteRows(tape, [u, routed], this.#byNode);
		using sentRows = rows!;
		using sentRouting = beside!;
		const { mostTokens } = parallel.capacity;
		const ofNodes = { group: between, expertTensor: 1, localExperts: 1, capacity: { bound: null, mostTokens } };
		this.#between = Exchange.plan(tape, this.#byNode, ofNodes, null);
		this.#coming = startDispatch(tape, { rows: sentRows, beside: sentRouting }, this.#between);
	}

	/** Number of experts of a node. */
	get #nodeExperts(): number {
		const { nodes, expertTensor, localExperts } = this.parallel;
		return (nodes.within.size / expertTensor) * localExperts;
	}

	finishDispatch(): ExpertRows {
		const { tape, parallel, overflow } = this;
		const { nodes, capacity } = parallel;
		const { between, within } = nodes;
		const { rows, beside } = this.#coming.finish();
		using come = rows;
		using routing = beside!;
		const experts = this.#nodeExperts;
		const options = { rowCount: this.#between.rowCount, firstExpert: between.rank * experts, experts };
		const chosen = nodeExperts(tape, routing, options);
		using expertIndex = chosen.expertIndex;
		using probabilities = chosen.probabilities;
		const byExpert = ExpertOrder.of(tape.device, expertIndex, experts);
		const own = { probabilities };
		// A member of a node may receive the tokens of `between.size` members; experts receive as many rows as without nodes.
		const room = {
			bound: capacity.bound === null ? null : capacity.bound / between.size,
			mostTokens: capacity.mostTokens === null ? null : capacity.mostTokens * between.size,
		};
		this.#within =
			within.size === 1
				? new LocalDispatcher(tape, come, own, byExpert, this.inE4m3)
				: new AllToAllDispatcher(tape, come, own, byExpert, { ...parallel, group: within, capacity: room }, overflow);
		return this.#within.finishDispatch();
	}

	startCombine(outputs: Tensor): void {
		this.#within!.startCombine(outputs);
		using sums = this.#within!.finishCombine();
		this.#returning = startCombine(this.tape, sums, this.#between);
	}

	finishCombine(): Tensor {
		using rows = this.#returning!.finish().rows;
		return unpermute(this.tape, rows, this.#byNode);
	}

	[Symbol.dispose](): void {
		for (const owned of [this.#between, this.#coming, this.#within, this.#returning, this.#byNode]) {
			owned?.[Symbol.dispose]();
		}
	}
}
