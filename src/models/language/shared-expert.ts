/** The shared expert, which every token passes beside its routed experts (docs/spec/language-model.md §4). */
import { linear, route, type Tape, type Tensor } from "../../tensor/index.ts";
import { enterFeedForward, feedForward, leaveFeedForward } from "./kinds/mlp.ts";
import type { LayerContext } from "./layer-context.ts";
import { isRecomputed, type ModuleOutput, runModule } from "./recomputed-module.ts";

const prefix = "mlp.shared_experts.";
/** Megatron's name of the gate's weight [1, H]. */
export const sharedExpertGate = `${prefix}gate_weight`;

/** σ(u_TH wᵀ), f32 [T, 1]: what a router with one expert gives. Weighs the activation before fc2, as routing weights do. */
function gate(tape: Tape, context: LayerContext, u: Tensor): Tensor {
	using logits = linear(tape, u, context.weights(sharedExpertGate), null, { outputDtype: "f32" });
	using routing = route(tape, logits, { topk: 1, scoreFunction: "sigmoid" });
	return routing.probabilities.share();
}

/**
 * The shared expert in two halves, each of which hides an exchange of rows, forward and backward: the constructor runs the first,
 * finish() the second. If it is recomputed it has no halves, and the constructor runs all of it.
 */
export class SharedExpert implements Disposable {
	readonly #whole: ModuleOutput | null;
	readonly #activated: Tensor | null;
	#y: Tensor | null = null;

	constructor(
		private readonly tape: Tape,
		private readonly context: LayerContext,
		u: Tensor,
	) {
		const { config } = context;
		const weigh = config.moe.sharedExpertGate ? gate : null;
		this.#whole = isRecomputed(tape, config, "shared_experts")
			? runModule(tape, config, "shared_experts", [u], (on, value) => feedForward(on, context, value, prefix, weigh))
			: null;
		this.#activated = this.#whole ? null : enterFeedForward(tape, context, u, prefix, weigh);
	}

	finish(): void {
		if (this.#activated) this.#y = leaveFeedForward(this.tape, this.context, this.#activated, prefix);
	}

	/** The output for this rank's tokens; set by finish(). */
	get y(): Tensor {
		return this.#whole?.y ?? this.#y!;
	}

	[Symbol.dispose](): void {
		for (const owned of [this.#whole, this.#activated, this.#y]) owned?.[Symbol.dispose]();
	}
}
