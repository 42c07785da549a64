/**
 * Vocabulary cross-entropy (docs/spec/language-model.md §5.2): the loss of every token, in three steps so that the
 * vocabulary may be cut into shards: statistics of a shard, their combination, the gradient of a shard's logits.
 */
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";

/** The columns of the vocabulary that a block of logits holds. */
export interface VocabularyShard {
	/** Vocabulary index of column 0. */
	readonly start: number;
	/** Columns that are real; those behind are padding and do not exist. */
	readonly live: number;
}

/** Per token: f32 [shards, T] each, `found` i32. The holder disposes it. */
export class CrossEntropyStatistics implements Disposable {
	constructor(
		readonly maximum: Tensor,
		/** Σ exp(logit - maximum). */
		readonly sumExp: Tensor,
		/** The label's logit, 0 where another shard owns it. */
		readonly targetLogit: Tensor,
		/** Whether this shard owns the label. */
		readonly found: Tensor,
	) {}

	[Symbol.dispose](): void {
		for (const tensor of [this.maximum, this.sumExp, this.targetLogit, this.found]) tensor[Symbol.dispose]();
	}
}

/** Statistics of one shard, [1, T]. logits_TV contiguous, labels_T i32. */
export function crossEntropyStatistics(logits: Tensor, labels: Tensor, shard: VocabularyShard): CrossEntropyStatistics {
	requireContiguous(logits);
	const { device, rows: tokens } = logits;
	const [maximum, sumExp, targetLogit] = [0, 1, 2].map(() => Tensor.empty(device, [1, tokens])) as [
		Tensor,
		Tensor,
		Tensor,
	];
	const found = Tensor.empty(device, [1, tokens], "i32");
	device.run("cross_entropy_statistics", {
		logits,
		labels,
		maximum,
		sum_exp: sumExp,
		target_logit: targetLogit,
		found,
		tokens,
		vocabulary_start: shard.start,
		vocabulary_rows: logits.width,
		vocabulary_live: shard.live,
		dtype: logits.dtypeCode,
	});
	return new CrossEntropyStatistics(maximum, sumExp, targetLogit, found);
}

/** Losses and log-sum-exp, f32 [T] each, of all shards' statistics, [shards, T]. */
export function crossEntropyLoss(statistics: CrossEntropyStatistics, zLoss: number): { loss: Tensor; lse: Tensor } {
	const [shards, tokens] = statistics.maximum.shape as [number, number];
	const { device } = statistics.maximum;
	const loss = Tensor.empty(device, [tokens]);
	const lse = Tensor.empty(device, [tokens]);
	device.run("cross_entropy_loss", {
		maximum: statistics.maximum,
		sum_exp: statistics.sumExp,
		target_logit: statistics.targetLogit,
		found: statistics.found,
		loss,
		lse,
		tokens,
		shards,
		z_loss: zLoss,
	});
	return { loss, lse };
}

/** Gradient of a shard's logits into `dlogits`, which may be the logits' own memory. dloss_T f32. */
export function crossEntropyBackward(
	logits: Tensor,
	labels: Tensor,
	lse: Tensor,
	dloss: Tensor,
	dlogits: Tensor,
	shard: VocabularyShard,
	options: { readonly zLoss: number; readonly roundBf16: boolean },
): void {
	requireContiguous(logits);
	requireContiguous(dlogits);
	logits.device.run("cross_entropy_backward", {
		logits,
		labels,
		lse,
		dloss,
		dlogits,
		tokens: logits.rows,
		vocabulary_start: shard.start,
		vocabulary_rows: logits.width,
		vocabulary_live: shard.live,
		z_loss: options.zLoss,
		round_bf16: Number(options.roundBf16),
		dtype: logits.dtypeCode,
	});
}

export interface CrossEntropyOptions {
	/** The part of the vocabulary that the logits' columns are; columns behind its live ones are padding. Default: all. */
	readonly shard?: VocabularyShard;
	/** Gathers the statistics of all shards, [shards, T], from this shard's, where the vocabulary is cut over ranks. */
	readonly gather?: (own: CrossEntropyStatistics) => CrossEntropyStatistics;
	/** Weight of the squared log-sum-exp added to every token's loss. */
	readonly zLoss?: number;
	/** Round the logits' gradient to bf16 whatever their storage, as Megatron's fused loss does. */
	readonly roundBf16?: boolean;
}

/**
 * Loss of every token, f32 [T], of whole rows of logits_TV and labels_T (i32). A label outside the vocabulary (-100)
 * gives a finite loss without meaning: multiply by a mask. The loss's gradient slot takes mask × scale, per token.
 */
export function crossEntropy(tape: Tape, logits: Tensor, labels: Tensor, options: CrossEntropyOptions = {}): Tensor {
	const { device } = tape;
	const shard = options.shard ?? { start: 0, live: logits.width };
	const zLoss = options.zLoss ?? 0;
	using own = crossEntropyStatistics(logits, labels, shard);
	using gathered = options.gather?.(own) ?? null;
	const { loss, lse } = crossEntropyLoss(gathered ?? own, zLoss);
	const y = tape.output(loss, logits.gradient !== null);
	tape.record({
		name: "cross_entropy",
		outputs: [y],
		keep: [logits, labels],
		own: [lse],
		backward: ([dloss]) => {
			// The logits are the largest activation of a step: when the tape alone still holds them, their gradient takes
			// their place.
			const alone = logits.allocation.references === 1;
			const dlogits = alone ? logits.withGradient(null) : Tensor.empty(device, logits.shape, logits.dtype);
			crossEntropyBackward(logits, labels, lse, dloss!, dlogits, shard, {
				zLoss,
				roundBf16: options.roundBf16 ?? false,
			});
			logits.gradient!.accumulate(dlogits);
		},
	});
	return y;
}

function requireContiguous(logits: Tensor): void {
	if (!logits.contiguous)
		throw new RangeError(`Cross-entropy takes contiguous logits, not rows ${logits.stride} apart.`);
}
