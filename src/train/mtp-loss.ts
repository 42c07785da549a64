/** Losses of multi-token prediction (docs/spec/language-model.md §5.4). */
import type { Microbatch } from "../data/microbatch.ts";
import { rolled } from "../data/roll.ts";
import type { ForwardInput, ModelChunk, Observer } from "../models/language/model-chunk.ts";
import { mtpDepth } from "../models/language/mtp.ts";
import { type Tape, Tensor } from "../tensor/index.ts";
import { lossTokens, type MicrobatchWeights } from "./loss-weights.ts";

export function depthLoss(depth: number): string {
	return `mtp_${depth + 1} loss`;
}

/** A depth's labels and loss weights for one microbatch. */
export interface DepthTarget extends Disposable {
	/** Name of the depth's loss. */
	readonly name: string;
	/** Prefix of the names of the depth's observed values. */
	readonly place: string;
	/** i32 [T]. */
	readonly labels: Tensor;
	/** f32 [T]: 1 / n where a label counts, n being their number, so that the logged loss is a microbatch mean. */
	readonly meanMask: Tensor;
	/**
	 * f32 [T], weight of each token's loss: (factor / depths) · (weight of the microbatch's mean loss) / n. A depth's mean has factor /
	 * depths times the weight of the next-token loss.
	 */
	readonly gradient: Tensor;
}

/**
 * Runs the depths one after the other on the main part's normed hidden states, and calls `use` with the normed hidden states of
 * each.
 */
export function forEachMtpDepth(
	tape: Tape,
	chunk: ModelChunk,
	microbatch: Microbatch,
	weights: MicrobatchWeights,
	normed: Tensor,
	input: ForwardInput,
	observe: Observer | undefined,
	use: (hidden: Tensor, target: DepthTarget) => void,
): void {
	const { mtp } = chunk.parts.config;
	if (mtp === null) return;
	let hidden = normed.share();
	for (let depth = 0; depth < mtp.depths; depth++) {
		using previous = hidden;
		const later = rolled(microbatch, depth + 1);
		using ids = Tensor.from(tape.device, later.ids);
		hidden = mtpDepth(tape, chunk.parts, depth, ids, previous, input, observe);
		use(hidden, targetOf(tape, later, depth, (mtp.lossScalingFactor / mtp.depths) * weights.loss));
	}
	hidden[Symbol.dispose]();
}

function targetOf(
	{ device }: Tape,
	later: Pick<Microbatch, "labels" | "lossMask">,
	depth: number,
	weight: number,
): DepthTarget {
	const own = lossTokens(later);
	const mean = (of: number) => later.lossMask.map((mask) => (own === 0 ? 0 : (mask * of) / own));
	const labels = Tensor.from(device, later.labels);
	const meanMask = Tensor.from(device, mean(1));
	const gradient = Tensor.from(device, mean(weight));
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
