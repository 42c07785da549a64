/** Losses of multi-token prediction (docs/spec/language-model.md §5.4); its layers are the language model's. */
import { lossTokens, type Microbatch } from "../../data/microbatch.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { mtpDepth } from "../../models/language/mtp.ts";
import type { Tensor } from "../../tensor/index.ts";
import type { Guest, HeadView, LossTerm } from "../guest.ts";

/** null: the model has no depths. */
export function mtpOf({ mtp }: HybridConfig): Guest | null {
	if (mtp === null) return null;
	const names = Array.from({ length: mtp.depths }, (_, depth) => ({ name: depthLoss(depth) }));
	return { losses: () => names, open: () => ({ beforeStep: () => ({ losses: depthLosses }) }) };
}

export function depthLoss(depth: number): string {
	return `mtp_${depth + 1} loss`;
}

/** Runs the depths one after the other on the main part's normed hidden states. */
function* depthLosses(pass: HeadView): Generator<LossTerm> {
	const { tape, chunk, text, hidden: normed, forward, observe } = pass;
	const mtp = chunk.parts.config.mtp!;
	let hidden = normed.share();
	for (let depth = 0; depth < mtp.depths; depth++) {
		using previous = hidden;
		const later = rolled(text, depth + 1);
		using ids = pass.input.cut(later.ids);
		hidden = mtpDepth(tape, chunk.parts, depth, ids, previous, forward, observe);
		const watch = observe && ((value: string, logits: Tensor) => observe(`mtp.${depth}.${value}`, logits));
		const labels = pass.own(pass.input.cut(later.labels));
		const { mask, gradient } = weightsOf(pass, later, (mtp.lossScalingFactor / mtp.depths) * pass.weight);
		yield { name: depthLoss(depth), loss: pass.tokenLoss(hidden, labels, watch), mask, gradient };
	}
	hidden[Symbol.dispose]();
}

/**
 * f32 [T / cp] each, n being the number of labels that count. mask: 1 / n where one counts, so that the logged loss is a microbatch mean.
 * gradient: `weight` / n there, with weight = (factor / depths) · (weight of the microbatch's mean loss): a depth's mean has factor /
 * depths times the weight of the next-token loss.
 */
function weightsOf(
	{ own, input }: Pick<HeadView, "own" | "input">,
	later: Pick<Microbatch, "labels" | "lossMask">,
	weight: number,
) {
	const counted = lossTokens(later);
	const mean = (of: number) => later.lossMask.map((mask) => (counted === 0 ? 0 : (mask * of) / counted));
	return { mask: own(input.cut(mean(1))), gradient: own(input.cut(mean(weight))) };
}

// A microbatch as an MTP depth reads it.

/** Ids, labels and mask of the tokens `shift` places later in the same sequence; zeros where the sequence has ended. */
export function rolled(
	{ ids, labels, lossMask, lengths }: Pick<Microbatch, "ids" | "labels" | "lossMask" | "lengths">,
	shift: number,
): Pick<Microbatch, "ids" | "labels" | "lossMask"> {
	const later = {
		ids: new Int32Array(ids.length),
		labels: new Int32Array(ids.length),
		lossMask: new Float32Array(ids.length),
	};
	let begin = 0;
	for (const length of lengths) {
		const end = begin + length;
		const from = Math.min(begin + shift, end);
		later.ids.set(ids.subarray(from, end), begin);
		later.labels.set(labels.subarray(from, end), begin);
		later.lossMask.set(lossMask.subarray(from, end), begin);
		begin = end;
	}
	return later;
}
