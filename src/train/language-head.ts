/** The guests' part in a pass of the language model: their companions, and at its end the losses, with the next token's. */
import { lossTokens } from "../data/microbatch.ts";
import type { HeadView, LanguageView, LossTerm, StepGuest } from "../guests/guest.ts";
import type { HybridModel } from "../models/language/model.ts";
import { gatherStatistics } from "../parallel/index.ts";
import { axpby, type CrossEntropyStatistics, crossEntropy, Tape, Tensor } from "../tensor/index.ts";
import type { Losses } from "./losses.ts";

/** The guests' companions for the next chunk. `entered`: from the chunk before, guest after guest; null on the first one. */
export function companionsOf(
	guests: readonly StepGuest[],
	view: Omit<LanguageView, "companions">,
	entered: readonly Tensor[] | null = null,
): Map<StepGuest, readonly Tensor[]> {
	let at = 0;
	return new Map(
		guests.map((guest) => {
			const begin = at;
			at += guest.companions?.(view.microbatch).length ?? 0;
			const own = guest.beforeChunk?.({ ...view, companions: entered?.slice(begin, at) ?? [] }) ?? [];
			return [guest, own.map(view.own)];
		}),
	);
}

/** A loss that is differentiated: of each token, and its weight. */
export interface WeighedLoss {
	readonly loss: Tensor;
	readonly gradient: Tensor;
}

/** Inputs of the head's losses. */
type Basis = Pick<HeadView, "microbatch" | "text" | "chunk" | "place" | "weight" | "observe" | "own"> &
	Pick<HeadView, "hidden" | "forward" | "input">;

export class LanguageHead implements Disposable {
	#weighed: WeighedLoss[] = [];
	#nextToken: ReturnType<HeadView["nextToken"]> | null = null;

	constructor(
		private readonly model: HybridModel,
		private readonly tape: Tape,
		private readonly basis: Basis,
	) {}

	/**
	 * Records all losses, adds them to `losses`, and returns those that are differentiated. `guests`: those of the pass, with their
	 * companions.
	 */
	losses(guests: ReadonlyMap<StepGuest, readonly Tensor[]>, losses: Losses): readonly WeighedLoss[] {
		const { microbatch, input, own } = this.basis;
		const share = [...guests.keys()].reduce((product, guest) => product * (guest.share?.(microbatch) ?? 1), 1);
		const tokenWeights = own(this.#tokenWeights());
		const nextToken = () => {
			this.#nextToken ??= this.#recordNextToken(tokenWeights, share);
			return this.#nextToken;
		};
		for (const [guest, companions] of guests) {
			const terms = guest.losses?.({
				...this.basis,
				tape: this.tape,
				companions,
				tokenWeights,
				nextToken,
				tokenLoss: (normed, labels, observe) => {
					using logits = this.basis.chunk.logits(this.tape, normed, observe);
					return own(tokenLoss(this.tape, this.model, logits, labels));
				},
			});
			for (const term of terms ?? []) this.#add(term, losses);
		}
		losses.add(nextToken().loss, input.mask);
		return this.#weighed;
	}

	#add({ name, loss, mask, gradient }: LossTerm, losses: Losses): void {
		if (gradient) this.#weighed.push({ loss, gradient });
		losses.add(loss, mask, name);
	}

	/** `share`: of the loss in the sum that is differentiated. At 0 it is only logged, and its tape records nothing. */
	#recordNextToken(weights: Tensor, share: number) {
		const { model, tape } = this;
		const { chunk, hidden, input, observe, own } = this.basis;
		const logits = chunk.logits(tape, hidden, observe);
		const recorded = share > 0 ? tape : new Tape(model.device, { recording: false });
		const loss = own(tokenLoss(recorded, model, logits, input.labels));
		if (share > 0) this.#weighed.push({ loss, gradient: share === 1 ? weights : own(scaled(weights, share)) });
		observe?.("per_token_loss", loss);
		return { logits, loss };
	}

	/** Weights_T of the tokens' losses: the mask, scaled so that the microbatch's mean loss gets the microbatch's weight. */
	#tokenWeights(): Tensor {
		const { input, text, weight } = this.basis;
		const tokens = lossTokens(text);
		if (weight === tokens) return input.mask.share();
		return input.cut(text.lossMask.map((counts) => counts * (weight / tokens)));
	}

	[Symbol.dispose](): void {
		this.#nextToken?.logits[Symbol.dispose]();
	}
}

function scaled(weights: Tensor, share: number): Tensor {
	const result = Tensor.empty(weights.device, weights.shape);
	axpby(weights, result, share, 0);
	return result;
}

// Cross-entropy of a language model whose vocabulary may be sharded over tensor-parallel ranks.

/** logits_T(V/tp), labels_T → loss_T of each token, equal on all tensor-parallel ranks. */
function tokenLoss(tape: Tape, model: HybridModel, logits: Tensor, labels: Tensor): Tensor {
	const { tp } = model.parallel;
	return crossEntropy(tape, logits, labels, {
		shard: model.vocabularyShard,
		// A held-out loss is the cross-entropy alone; the z-losses of routers are left out of it too.
		zLoss: tape.training ? model.config.zLossCoefficient : 0,
		roundBf16: model.config.crossEntropyRoundsBf16,
		...(tp.size === 1 ? {} : { gather: (own: CrossEntropyStatistics) => gatherStatistics(own, tp) }),
	});
}
