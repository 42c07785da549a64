/** A router's state between microbatches and steps: expert bias, token counts, balancing losses. */
import type { Device } from "../../native/device.ts";
import type { Group } from "../../parallel/group.ts";
import { updateExpertBias } from "../../tensor/ops/router.ts";
import { axpby, Tensor } from "../../tensor/tensor.ts";
import type { HybridConfig } from "./config.ts";

/** Megatron's names of the logged losses (docs/spec/runtime.md §6.4). */
const loggedNames = {
	seq_aux_loss: "seq_load_balancing_loss",
	aux_loss: "load_balancing_loss",
	global_aux_loss: "global_load_balancing_loss",
	z_loss: "z_loss",
} as const;
export type RouterLoss = keyof typeof loggedNames;

/** The losses that routers of this configuration have, in order. */
export function routerLosses({ balancing, zLossCoefficient }: HybridConfig["moe"]): RouterLoss[] {
	return [...balancing.map(({ type }) => type), ...(zLossCoefficient > 0 ? (["z_loss"] as const) : [])];
}

/** Megatron's name of a logged loss. */
export function loggedName(loss: RouterLoss): string {
	return loggedNames[loss];
}

export class RouterState implements Disposable {
	/** Added to scores when experts are chosen; f32 [E]. */
	readonly expertBias: Tensor;
	/** Tokens sent to each expert since the last update; i32 [E]. */
	readonly tokensPerExpert: Tensor;
	/** Tokens sent to each expert in the latest step, by all ranks; i32 [E]. */
	readonly stepTokens: Tensor;
	/** Each configured loss summed over the microbatches since takeLosses; f32 [1]. */
	readonly sums: ReadonlyMap<RouterLoss, Tensor>;
	/** global_aux_loss: counts summed over the step's microbatches so far, f32 [1, E]. */
	readonly #stepCounts: Tensor;
	#stepMicrobatches = 0;
	/** i32 [2], not owned: rows that this rank's experts had no room for (Exchange.plan). */
	overflow: Tensor | null = null;
	/** Sees, and may change, a microbatch's logits [T, E] of this rank's tokens before experts are chosen. */
	onLogits: ((logits: Tensor) => void) | null = null;
	/** Sees every microbatch's choice: experts [T, K], logits [T, E] and routing weights [T, K] of this rank's tokens. */
	onRouting: ((expertIndex: Tensor, logits: Tensor, probabilities: Tensor) => void) | null = null;

	constructor(
		readonly device: Device,
		readonly moe: HybridConfig["moe"],
		readonly options: {
			/** Ranks over which a microbatch's tokens are cut. */
			readonly tokenShards: number;
			/** How often a microbatch passes this router; each pass's losses weigh as much less (docs/spec/language-model.md §4.4). */
			readonly passes: number;
		},
	) {
		this.expertBias = Tensor.zeros(device, [moe.experts], "f32", "parameter");
		this.tokensPerExpert = Tensor.zeros(device, [moe.experts], "i32", "parameter");
		this.stepTokens = Tensor.zeros(device, [moe.experts], "i32", "parameter");
		this.#stepCounts = Tensor.zeros(device, [1, moe.experts], "f32", "parameter");
		this.sums = new Map(routerLosses(moe).map((name) => [name, Tensor.zeros(device, [1], "f32", "parameter")]));
	}

	/** Replaces a microbatch's counts by their mean over the step's microbatches so far, this one included. */
	averageCounts(counts: Tensor): void {
		axpby(counts, this.#stepCounts, 1, 1);
		this.#stepMicrobatches++;
		this.readAverageCounts(counts);
	}

	/** The mean as averageCounts left it: for a replay of the microbatch. */
	readAverageCounts(counts: Tensor): void {
		axpby(this.#stepCounts, counts, 1 / this.#stepMicrobatches, 0);
	}

	/**
	 * End of a step: updates the expert bias from the tokens that all ranks of `group` (those that hold this router)
	 * counted in it (docs/spec/language-model.md §4.3).
	 */
	finishStep(group: Group): void {
		group.allReduce(this.tokensPerExpert).wait();
		this.device.copy(this.stepTokens, this.tokensPerExpert, this.stepTokens.bytes);
		updateExpertBias(this.device, this.expertBias, this.tokensPerExpert, this.moe.biasUpdateRate);
		this.device.setZero(this.#stepCounts, this.#stepCounts.bytes);
		this.#stepMicrobatches = 0;
	}

	/**
	 * Mean losses of a microbatch over all ranks of `group`, before their coefficients, as routerLosses orders them; the
	 * z-loss is the mean of a token. `microbatches` and `tokens` are this rank's: ranks that cut a microbatch's tokens
	 * each have a part of its loss, lanes have microbatches of their own.
	 */
	takeLosses(group: Group, microbatches: number, tokens: number): number[] {
		const lanes = group.size / this.options.tokenShards;
		const passes = microbatches * this.options.passes;
		return [...this.sums].map(([name, sum]) => {
			group.allReduce(sum).wait();
			const coefficient = this.moe.balancing.find(({ type }) => type === name)?.coefficient;
			const total = sum.item() / lanes;
			this.device.setZero(sum, sum.bytes);
			return coefficient === undefined ? total / tokens / this.options.passes : total / coefficient / passes;
		});
	}

	[Symbol.dispose](): void {
		for (const owned of [this.expertBias, this.tokensPerExpert, this.stepTokens, this.#stepCounts])
			owned[Symbol.dispose]();
		for (const sum of this.sums.values()) sum[Symbol.dispose]();
	}
}
