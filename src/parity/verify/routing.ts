/** The experts that every token was sent to: a flipped decision explains a difference that no tolerance should hide. */
import type { HybridModel } from "../../models/language/model.ts";

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

/** A layer, and which of a microbatch's passes through it: an MTP depth that is repeated has several. */
interface Pass {
	readonly layer: number;
	readonly pass: number;
}

const keyOf = ({ layer, pass }: Pass) => `${layer}.${pass}`;

/** Everything one rank's routers decided in a step. */
export class RoutingRecorder {
	/** By layer, in the order the microbatches ran, each as often as it passes the layer. */
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
	*decisions(firstToken: number): Generator<Decision & Run & Pass> {
		const { model } = this;
		if (model === null) return;
		const { tokens } = model.parallel;
		for (const [layer, found] of this.#decisions) {
			const { passes } = model.routers.get(layer)!.options;
			const microbatches = Array.from({ length: found.length / passes }, (_, at) =>
				found.slice(at * passes, (at + 1) * passes),
			);
			let first = firstToken;
			for (const decisions of this.order === "first first" ? microbatches : microbatches.toReversed()) {
				const count = decisions[0]!.experts.length / model.config.moe.topk;
				for (const [pass, decision] of decisions.entries()) {
					yield { ...decision, layer, pass, first: first + tokens.rank * count, count };
				}
				first += tokens.size * count;
			}
		}
	}
}

/** The decisions of all tokens of a step, of one process. */
export class RoutingTable {
	/** [tokens, topk] by layer and pass, as "5.0". */
	readonly experts = new Map<string, Int32Array>();
	/** [tokens, experts] by layer and pass. */
	readonly logits = new Map<string, Float32Array>();

	static of(recorder: RoutingRecorder, tokens: number): RoutingTable {
		const table = new RoutingTable();
		for (const { first, count, experts, logits, ...pass } of recorder.decisions(0)) {
			const [topk, all] = [experts.length / count, logits.length / count];
			const key = keyOf(pass);
			if (!table.experts.has(key)) {
				table.experts.set(key, new Int32Array(tokens * topk));
				table.logits.set(key, new Float32Array(tokens * all));
			}
			table.experts.get(key)!.set(experts, first * topk);
			table.logits.get(key)!.set(logits, first * all);
		}
		return table;
	}

	/** Tokens of this rank that were sent elsewhere than the table says. */
	flips(recorder: RoutingRecorder, firstToken: number): Flip[] {
		const flips: Flip[] = [];
		for (const { layer, pass, first, count, experts } of recorder.decisions(firstToken)) {
			const topk = experts.length / count;
			const table = this.experts.get(keyOf({ layer, pass }))!;
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
