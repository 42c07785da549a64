/** Losses of multi-token prediction beside the language model's (docs/spec/language-model.md §5.4). */
import type { Microbatch } from "../data/microbatch.ts";
import { rolled } from "../data/roll.ts";
import { mtpDepth } from "../models/hybrid/mtp.ts";
import type { ForwardInput, HybridStage, Observer } from "../models/hybrid/stage.ts";
import type { Tape } from "../tensor/tape.ts";
import { Tensor } from "../tensor/tensor.ts";

export function depthLoss(depth: number): string {
	return `mtp_${depth + 1} loss`;
}

/** Target of a depth in a microbatch. */
export interface DepthTarget extends Disposable {
	/** Name of its loss. */
	readonly name: string;
	/** Begin of the names of its observed values. */
	readonly place: string;
	/** i32 [T]. */
	readonly labels: Tensor;
	/** 1 / n where a label counts, n being how many do: the loss that is logged is a microbatch's mean. f32 [T]. */
	readonly meanMask: Tensor;
	/**
	 * Gradient of each token's loss, f32 [T]: the factor, over depths, times the microbatch's loss tokens over n, so that
	 * dividing by the step's loss tokens leaves a depth as much weight as the next token's loss has, times factor / depths.
	 */
	readonly gradient: Tensor;
}

/** Runs every depth on the normed hidden states of the main part; `use` is given each one's normed hidden states. */
export function forEachMtpDepth(
	tape: Tape,
	stage: HybridStage,
	microbatch: Microbatch,
	normed: Tensor,
	input: ForwardInput,
	observe: Observer | undefined,
	use: (hidden: Tensor, target: DepthTarget) => void,
): void {
	const { prediction } = stage.parts.config;
	if (prediction === null) return;
	let hidden = normed.share();
	for (let depth = 0; depth < prediction.depths; depth++) {
		using previous = hidden;
		const later = rolled(microbatch, depth + 1);
		using ids = Tensor.from(tape.device, later.ids);
		hidden = mtpDepth(tape, stage.parts, depth, ids, previous, input, observe);
		use(hidden, targetOf(tape, microbatch, later, depth, prediction.lossScalingFactor / prediction.depths));
	}
	hidden[Symbol.dispose]();
}

function targetOf(
	{ device }: Tape,
	{ lossMask }: Microbatch,
	later: Pick<Microbatch, "labels" | "lossMask">,
	depth: number,
	factor: number,
): DepthTarget {
	const own = sum(later.lossMask);
	const mean = (weight: number) => later.lossMask.map((mask) => (own === 0 ? 0 : (mask * weight) / own));
	const labels = Tensor.from(device, later.labels);
	const meanMask = Tensor.from(device, mean(1));
	const gradient = Tensor.from(device, mean(factor * sum(lossMask)));
	return {
		name: depthLoss(depth),
		place: `mtp.${depth}`,
		labels,
		meanMask,
		gradient,
		[Symbol.dispose]() {
			for (const owned of [labels, meanMask, gradient]) owned[Symbol.dispose]();
		},
	};
}

function sum(mask: Float32Array): number {
	return mask.reduce((total, value) => total + value, 0);
}
