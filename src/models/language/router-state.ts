/** A router's state over microbatches and steps: expert bias, token counts, accumulated losses. */
import type { Device } from "../../native/device.ts";
import type { Group } from "../../parallel/index.ts";
import { axpby, Tensor, updateExpertBias } from "../../tensor/index.ts";
import type { HybridConfig } from "./config.ts";

/** Names of the logged losses, Megatron's where it has them (docs/spec/runtime.md §6.4). */
const loggedNames = {
	seq_aux_loss: "seq_load_balancing_loss",
	aux_loss: "load_balancing_loss",
	global_aux_loss: "global_load_balancing_loss",
	pooled_aux_loss: "pooled_load_balancing_loss",
	z_loss: "z_loss",
} as const;
export type RouterLoss = keyof typeof loggedNames;

/** The losses of the configured routers, in order. */
export function routerLosses({ balancing, zLossCoefficient }: HybridConfig["moe"]): RouterLoss[] {
	return [...balancing.map(({ type }) => type), ...(zLossCoefficient > 0 ? (["z_loss"] as const) : [])];
}

/** Megatron's name of a logged loss. */
export function loggedName(loss: RouterLoss): string {
	return loggedNames[loss];
}

export class RouterState implements Disposable {
	/** f32 [E], added to scores for the choice of experts. */
	readonly expertBias: Tensor;
	/** i32 [E]: tokens routed to each expert since the last bias update. */
	readonly tokensPerExpert: Tensor;
	/** i32 [E]: tokens that all ranks routed to each expert in the latest step. */
	readonly stepTokens: Tensor;
	/** f32 [1] each: sum of each configured loss over the microbatches since takeLosses. */
	readonly sums: ReadonlyMap<RouterLoss, Tensor>;
	/** f32 [1, E], for global_aux_loss: counts summed over the step's microbatches so far. */
	readonly #stepCounts: Tensor;
	#stepMicrobatches = 0;
	/** [E]: tokens of this rank since the last bias update that balanced experts would have got; null: all alike. */
	#balanced: Float64Array | null = null;
	/** i32 [2], not owned: written by Exchange.plan if rows do not fit. */
	overflow: Tensor | null = null;
	/** Called with a microbatch's logits [T, E] of this rank's tokens before experts are chosen; may change them. */
	onLogits: ((logits: Tensor) => void) | null = null;
	/** Called with each microbatch's choice: experts [T, K], logits [T, E] and routing weights [T, K] of this rank's tokens. */
	onRouting: ((expertIndex: Tensor, logits: Tensor, probabilities: Tensor) => void) | null = null;

	constructor(
		readonly device: Device,
		readonly moe: HybridConfig["moe"],
		readonly options: {
			/** Number of ranks over which a microbatch's tokens are split. */
			readonly tokenShards: number;
			/**
			 * How often a microbatch passes this router (repeated MTP depths); each pass's losses are divided by it
			 * (docs/spec/language-model.md §4.4).
			 */
			readonly passes: number;
		},
	) {
		this.expertBias = Tensor.zeros(device, [moe.experts], "f32", "parameter");
		this.tokensPerExpert = Tensor.zeros(device, [moe.experts], "i32", "parameter");
		this.stepTokens = Tensor.zeros(device, [moe.experts], "i32", "parameter");
		this.#stepCounts = Tensor.zeros(device, [1, moe.experts], "f32", "parameter");
		this.sums = new Map(routerLosses(moe).map((name) => [name, Tensor.zeros(device, [1], "f32", "parameter")]));
	}

	/**
	 * For global_aux_loss: replaces a microbatch's counts by their mean over the step's microbatches so far, this one included.
	 */
	averageCounts(counts: Tensor): void {
		axpby(counts, this.#stepCounts, 1, 1);
		this.#stepMicrobatches++;
		axpby(this.#stepCounts, counts, 1 / this.#stepMicrobatches, 0);
	}

	/** Counts the choices of a microbatch whose masks give experts these shares of balanced tokens; they sum to 1. */
	expect(shares: Float64Array, choices: number): void {
		const before = this.#balanced;
		this.#balanced = shares.map((share, e) => (before?.[e] ?? 0) + choices * share);
	}

	/**
	 * Ends a step: updates the expert bias from the tokens that all ranks of `group` (those with a replica of this router)
	 * counted (docs/spec/language-model.md §4.3).
	 */
	finishStep(group: Group): void {
		group.allReduce(this.tokensPerExpert).wait();
		this.device.copy(this.stepTokens, this.tokensPerExpert, this.stepTokens.bytes);
		this.#updateBias(group);
		this.device.setZero(this.#stepCounts, this.#stepCounts.bytes);
		this.#stepMicrobatches = 0;
	}

	/** Masked experts are compared with the tokens that their factors let them expect, all others with the mean. */
	#updateBias(group: Group): void {
		const { device, expertBias, tokensPerExpert } = this;
		const { biasUpdateRate } = this.moe;
		if (this.#balanced === null) {
			updateExpertBias(device, expertBias, tokensPerExpert, biasUpdateRate);
			return;
		}
		using sums = Tensor.from(device, Float32Array.from(this.#balanced));
		this.#balanced = null;
		group.allReduce(sums).wait();
		const balanced = sums.toFloat32();
		const counts = tokensPerExpert.toInt32();
		const next = expertBias.toFloat32().map((bias, e) => {
			const missing = balanced[e]! - counts[e]!;
			// A sum of shares is a whole number but for rounding.
			return Math.abs(missing) < 1e-3 ? bias : bias + Math.sign(missing) * biasUpdateRate;
		});
		device.copyToDevice(expertBias, next);
		device.setZero(tokensPerExpert, tokensPerExpert.bytes);
	}

	/**
	 * Mean losses of a microbatch over all ranks of `group`, before their coefficients, in the order of routerLosses; the z-loss
	 * is the mean over tokens. `microbatches` and `tokens` are this rank's: sequence-parallel ranks each have a part of a
	 * microbatch's loss, data lanes have microbatches of their own.
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
