/** The experts that every token was sent to: a flipped decision explains a difference that no tolerance should hide. */
import type { HybridModel } from "../../models/hybrid/model.ts";

/** A token that other experts were chosen for than in the reference. */
export interface Flip {
	/** Layer, from 0. */
	readonly layer: number;
	/** Index among the tokens of the global batch. */
	readonly token: number;
	readonly experts: readonly number[];
	readonly reference: readonly number[];
}

interface Decision {
	/** [tokens of this rank, topk]. */
	readonly experts: Int32Array;
	/** [tokens of this rank, experts]. */
	readonly logits: Float32Array;
}

/** Tokens [first, first + count) of the global batch, as one microbatch has them on one rank. */
interface Run {
	readonly first: number;
	readonly count: number;
}

/** Everything one rank's routers decided in a step. */
export class RoutingRecorder {
	/** By layer, in the order the microbatches ran. */
	readonly #decisions = new Map<number, Decision[]>();

	constructor(
		/** null: this rank has no routers. */
		readonly model: HybridModel | null,
		readonly order: "first first" | "last first",
	) {
		for (const [layer, router] of model?.routers ?? []) {
			router.onRouting = (experts, logits) => {
				const decisions = this.#decisions.get(layer) ?? [];
				this.#decisions.set(layer, decisions);
				decisions.push({ experts: experts.toInt32(), logits: logits.toFloat32() });
			};
		}
	}

	clear(): void {
		this.#decisions.clear();
	}

	/** Visits a layer's decisions with the tokens they are about. `firstToken`: of this rank's lane. */
	*decisions(firstToken: number): Generator<Decision & Run & { readonly layer: number }> {
		const { model } = this;
		if (model === null) return;
		const { tp } = model.parallel;
		for (const [layer, found] of this.#decisions) {
			const inOrder = this.order === "first first" ? found : found.toReversed();
			let first = firstToken;
			for (const decision of inOrder) {
				const count = decision.experts.length / model.config.moe.topk;
				yield { ...decision, layer, first: first + tp.rank * count, count };
				first += tp.size * count;
			}
		}
	}
}

/** The decisions of all tokens of a step, of one process. */
export class RoutingTable {
	/** [tokens, topk] by layer. */
	readonly experts = new Map<number, Int32Array>();
	/** [tokens, experts] by layer. */
	readonly logits = new Map<number, Float32Array>();

	static of(recorder: RoutingRecorder, tokens: number): RoutingTable {
		const table = new RoutingTable();
		for (const { layer, first, count, experts, logits } of recorder.decisions(0)) {
			const [topk, all] = [experts.length / count, logits.length / count];
			if (!table.experts.has(layer)) {
				table.experts.set(layer, new Int32Array(tokens * topk));
				table.logits.set(layer, new Float32Array(tokens * all));
			}
			table.experts.get(layer)!.set(experts, first * topk);
			table.logits.get(layer)!.set(logits, first * all);
		}
		return table;
	}

	/** Tokens of this rank that were sent elsewhere than the table says. */
	flips(recorder: RoutingRecorder, firstToken: number): Flip[] {
		const flips: Flip[] = [];
		for (const { layer, first, count, experts } of recorder.decisions(firstToken)) {
			const topk = experts.length / count;
			const table = this.experts.get(layer)!;
			for (let token = 0; token < count; token++) {
				const own = [...experts.subarray(token * topk, (token + 1) * topk)];
				const reference = [...table.subarray((first + token) * topk, (first + token + 1) * topk)];
				if (own.some((expert, i) => expert !== reference[i])) {
					flips.push({ layer, token: first + token, experts: own, reference });
				}
			}
		}
		return flips;
	}
}
