/**
 * The balancing loss of transformers (load_balancing_loss_func; docs/spec/families.md §2.7): one for all layers together. The counts of
 * choices are pooled over layers, pipeline stages and data lanes before a microbatch goes backward: they travel from chunk to chunk
 * behind its hidden states, and their sums come back before its gradients.
 */
import type { Edge, Group } from "../../parallel/index.ts";
import { axpby, balancingLoss, RouterStatistics, type Tape, Tensor } from "../../tensor/index.ts";
import type { HybridConfig } from "./config.ts";
import { kinds } from "./kinds/index.ts";
import { allLayers } from "./layer-numbering.ts";
import type { RouterState } from "./router-state.ts";

/** Where the counts of a chunk go. */
export interface PooledLinks {
	/** Tensor-parallel ranks and data lanes of this stage. */
	readonly routers: Group;
	/** Edges from the chunk before and to the chunk after, with rows of E counts; null at an end of the pipeline. */
	readonly before: Edge | null;
	readonly after: Edge | null;
}

/** Coefficient of the pooled loss; null: the model has none. */
export function pooledCoefficient(config: HybridConfig): number | null {
	const pooled = config.moe.balancing.find(({ type }) => type === "pooled_aux_loss");
	return pooled && passesOf(config).layers > 0 ? pooled.coefficient : null;
}

/** A chunk's pass of one microbatch through the routers of one layer. */
interface Routed {
	readonly router: RouterState;
	/** Of this rank's tokens as one sequence. */
	readonly statistics: RouterStatistics;
	/** Weight of the microbatch's router losses. */
	readonly weight: number;
}

/** One microbatch's pass through a chunk. */
export class PooledBalancing implements Disposable {
	/** f32 [1, E]: of this chunk; with pool() of all lanes and chunks up to it, with settle() of the whole model. */
	readonly #counts: Tensor;
	/** f32 [1]: tokens of all lanes; null: the chunk has no router. */
	#tokens: Tensor | null = null;
	readonly #routed: Routed[] = [];

	constructor(
		readonly config: HybridConfig,
		device: Tensor["device"],
		private readonly links: PooledLinks,
	) {
		this.#counts = Tensor.zeros(device, [1, config.moe.experts]);
	}

	/** Called by a layer with its statistics, before their counts are summed over any ranks; a second forward adds their gradients. */
	add(tape: Tape, router: RouterState, statistics: RouterStatistics, weight: number): void {
		const routed = { router, statistics: statistics.pooled(), weight };
		if (tape.replaying) {
			using _statistics = routed.statistics;
			this.#balance(tape, routed);
			return;
		}
		axpby(routed.statistics.counts, this.#counts, 1, 1);
		this.#routed.push(routed);
	}

	/** Ends the chunk's forward pass. Collective over its ranks. */
	pool(): void {
		const { routers, before, after } = this.links;
		routers.allReduce(this.#counts).wait();
		const [first] = this.#routed;
		if (first) {
			this.#tokens = first.statistics.tokens.share();
			routers.allReduce(this.#tokens).wait();
		}
		if (before) {
			using earlier = before.receiveForward([1], { returns: true }).rows;
			axpby(earlier, this.#counts, 1, 1);
		}
		after?.sendForward({ rows: this.#counts, rowsPerSample: [] }, { returns: true });
	}

	/** Begins the chunk's backward pass: computes the loss, and adds its gradients to the routings'. */
	settle(tape: Tape): void {
		const { before, after } = this.links;
		if (after) {
			using total = after.receiveBackward()!;
			axpby(total, this.#counts, 1, 0);
		}
		before?.sendBackward(this.#counts.share());
		for (const routed of this.#routed.splice(0)) {
			using _statistics = routed.statistics;
			this.#balance(tape, routed);
		}
	}

	/**
	 * E Σ_e C_e S_e / N² of this layer's score sums S, with the counts C and the N tokens of all layers. Reports average over
	 * layers and lanes, while the layers' parts add up to the loss.
	 */
	#balance(tape: Tape, { router, statistics, weight }: Routed): void {
		const { scoreSums, dnormalised, topk } = statistics;
		using counts = this.#counts.share();
		using tokens = this.#tokens!.share();
		const pooled = new RouterStatistics(counts, scoreSums, tokens, dnormalised, topk);
		const { passes, tokenShards } = router.options;
		const { layers, ofModel } = passesOf(this.config);
		const reported = layers * passes;
		const lanes = this.links.routers.size / tokenShards;
		balancingLoss(tape, pooled, {
			coefficient: topk * pooledCoefficient(this.config)! * reported * lanes,
			gradientScale: weight / reported,
			sequenceShards: ofModel,
			loss: router.sums.get("pooled_aux_loss")!,
		});
	}

	[Symbol.dispose](): void {
		for (const { statistics } of this.#routed.splice(0)) statistics[Symbol.dispose]();
		this.#tokens?.[Symbol.dispose]();
		this.#counts[Symbol.dispose]();
	}
}

/** Layers with routers, and how often a microbatch passes one: depths that are repeated pass theirs several times. */
function passesOf(config: HybridConfig): { readonly layers: number; readonly ofModel: number } {
	const routed = allLayers(config).filter(({ kind }) => kinds[kind].routes);
	const repeats = config.mtp?.repeated ? config.mtp.depths : 1;
	const passes = routed.map(({ index }) => (index >= config.pattern.length ? repeats : 1));
	return { layers: routed.length, ofModel: passes.reduce((sum, of) => sum + of, 0) };
}
