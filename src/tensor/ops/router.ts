/**
 * The router (docs/spec/language-model.md §4.2–§4.4): scores, deterministic top-k, routing weights, balancing losses,
 * bias update. Balancing takes two steps, so that ranks that share a sequence can sum its counts in between: route()
 * leaves statistics, balancingLoss() turns them into a loss and into the gradient that route()'s backward adds.
 */
import { ScoreFunction, type ScoreFunctionName } from "../../native/abi.ts";
import type { Device } from "../../native/device.ts";
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

export interface RouterOptions {
	readonly topk: number;
	readonly scoreFunction: ScoreFunctionName;
	/** Softmax scores: over all experts before top-k, instead of over the selected ones after it. */
	readonly preSoftmax?: boolean;
	/** λ: every routing weight is multiplied by it. */
	readonly scalingFactor?: number;
	/** f32 [E], added to the scores for selection only; sigmoid scores. */
	readonly expertBias?: Tensor | null;
	/** f32 [E], added to the logits for selection, whatever the scores are; without expertBias and groups. */
	readonly logitOffsets?: Tensor | null;
	/**
	 * Only experts of the `topk` best of `count` equal groups are selected; a group's score is the sum of its
	 * `scoreTopk` best biased scores, or logits with softmax after top-k (Megatron: topk // groups.topk, Hugging Face: 2).
	 */
	readonly groups?: { readonly count: number; readonly topk: number; readonly scoreTopk: number } | null;
	/** u8 [T], 1 = padding: routed, but left out of every count, statistic and loss. */
	readonly paddingMask?: Tensor | null;
	/** int32 [E]: the tokens routed to every expert are added, unless the tape replays. */
	readonly tokensPerExpert?: Tensor | null;
	/** Gather the statistics of balancing losses over these sequences (the whole microbatch as one: aux_loss). */
	readonly statistics?: Sequences | null;
	/** z-loss: Σ_t logsumexp(ℓ_t)² is added to `sum` (f32 [1]) and its gradient, times `gradientScale`, to the logits'. */
	readonly zLoss?: { readonly sum: Tensor; readonly gradientScale: number } | null;
}

/**
 * Statistics from which balancing losses are computed, one row a sequence. Counts and tokens may be summed over ranks
 * in place.
 */
export class RouterStatistics implements Disposable {
	constructor(
		/** f32 [S, E]: tokens whose top-k, without bias and group limit, holds the expert. */
		readonly counts: Tensor,
		/** f32 [S, E]: Σ of the tokens' normalised scores. */
		readonly scoreSums: Tensor,
		/** f32 [S]: tokens that are not padding. */
		readonly tokens: Tensor,
		/** f32 [sequences of the routing, E]: ∂loss/∂(a token's normalised score); null when nothing is recorded. */
		readonly dnormalised: Tensor | null,
		readonly topk: number,
	) {}

	/** The same statistics with the whole microbatch as one sequence, for aux_loss beside seq_aux_loss. */
	pooled(): RouterStatistics {
		using tokens = this.tokens.view([this.tokens.elements, 1]);
		return new RouterStatistics(
			sumOfRows(this.counts),
			sumOfRows(this.scoreSums),
			sumOfRows(tokens),
			this.dnormalised?.share() ?? null,
			this.topk,
		);
	}

	[Symbol.dispose](): void {
		for (const tensor of [this.counts, this.scoreSums, this.tokens, this.dnormalised]) tensor?.[Symbol.dispose]();
	}
}

function sumOfRows(x: Tensor): Tensor {
	const sum = Tensor.zeros(x.device, [1, x.width]);
	x.device.run("column_sum", {
		dy: x,
		dbias: sum,
		row_count: null,
		rows: x.rows,
		width: x.width,
		stride: x.stride,
		dtype: x.dtypeCode,
	});
	return sum;
}

export class Routing implements Disposable {
	constructor(
		/** f32 [T, K] routing weights, with a gradient slot; columns in ascending expert order. */
		readonly probabilities: Tensor,
		/** int32 [T, K], ascending in every row. */
		readonly expertIndex: Tensor,
		/** null unless asked for. */
		readonly statistics: RouterStatistics | null,
	) {}

	[Symbol.dispose](): void {
		this.probabilities[Symbol.dispose]();
		this.expertIndex[Symbol.dispose]();
		this.statistics?.[Symbol.dispose]();
	}
}

/** logits_TE (f32) → the selected experts of every token and their weights. Ties go to the lower expert index. */
export function route(tape: Tape, logits: Tensor, options: RouterOptions): Routing {
	const { device } = tape;
	if (!logits.contiguous || logits.dtype !== "f32") throw new TypeError("route takes contiguous f32 logits.");
	const [tokens, experts] = [logits.rows, logits.width];
	const { topk, groups = null, paddingMask = null, statistics: sequences = null, zLoss = null } = options;
	const wanted = logits.gradient !== null;
	const scores = Tensor.empty(device, [tokens, experts]);
	const expertIndex = Tensor.empty(device, [tokens, topk], "i32");
	const probabilities = tape.output(Tensor.empty(device, [tokens, topk]), wanted);
	const statistics =
		sequences && statisticsMemory(device, sequences, { experts, topk, recorded: tape.recording && wanted });
	const common = {
		logits,
		padding_mask: paddingMask,
		cu_seqlens: sequences?.cuSeqlens ?? null,
		scores,
		probabilities,
		expert_index: expertIndex,
		sequences: sequences?.count ?? 0,
		tokens,
		experts,
		topk,
		scaling_factor: options.scalingFactor ?? 1,
		score_function: ScoreFunction[options.scoreFunction],
		pre_softmax: Number(options.preSoftmax ?? false),
	};
	device.run("router_forward", {
		...common,
		expert_bias: options.expertBias ?? null,
		logit_offsets: options.logitOffsets ?? null,
		tokens_per_expert: tape.replaying ? null : (options.tokensPerExpert ?? null),
		sequence_counts: statistics?.counts ?? null,
		sequence_score_sums: statistics?.scoreSums ?? null,
		sequence_tokens: statistics?.tokens ?? null,
		expert_groups: groups?.count ?? 1,
		group_topk: groups?.topk ?? 1,
		group_score_topk: groups?.scoreTopk ?? 1,
	});
	if (zLoss && !tape.replaying) {
		device.run("router_z_loss", { logits, padding_mask: paddingMask, z_loss: zLoss.sum, tokens, experts });
	}
	const dnormalised = statistics?.dnormalised ?? null;
	tape.record({
		name: "route",
		outputs: [probabilities],
		keep: [logits, probabilities, expertIndex, paddingMask, common.cu_seqlens, dnormalised],
		own: [scores],
		backward: ([gradient]) => {
			using dprobabilities = contiguous(gradient!);
			const dlogits = logits.gradient!.contiguousTarget();
			device.run("router_backward", {
				...common,
				dprobabilities,
				dnormalised,
				dlogits,
				z_loss_scale: zLoss?.gradientScale ?? 0,
			});
			logits.gradient!.accumulate(dlogits);
		},
	});
	return new Routing(probabilities, expertIndex, statistics);
}

/** Memory of the statistics that the forward kernel writes. */
function statisticsMemory(
	device: Device,
	{ count }: Sequences,
	{ experts, topk, recorded }: { readonly experts: number; readonly topk: number; readonly recorded: boolean },
): RouterStatistics {
	return new RouterStatistics(
		Tensor.empty(device, [count, experts]),
		Tensor.empty(device, [count, experts]),
		Tensor.empty(device, [count]),
		recorded ? Tensor.zeros(device, [count, experts]) : null,
		topk,
	);
}

export interface BalancingLossOptions {
	/** α: the loss of a perfectly balanced router. */
	readonly coefficient: number;
	/** Weight of this loss in the differentiated sum (docs/spec/language-model.md §4.4). */
	readonly gradientScale: number;
	/** Ranks over which a sequence is cut, when `tokens` of the statistics counts this rank's part only. */
	readonly sequenceShards?: number;
	/** f32 [1], the unscaled loss is added unless the tape replays; null: not wanted. */
	readonly loss?: Tensor | null;
}

/**
 * Adds one balancing loss, α E / (K S) Σ_q Σ_e counts scoreSums / tokens², to what route() differentiates. Call it
 * before the backward pass, once for every loss of a list.
 */
export function balancingLoss(tape: Tape, statistics: RouterStatistics, options: BalancingLossOptions): void {
	tape.device.run("router_balancing_loss", {
		sequence_counts: statistics.counts,
		sequence_score_sums: statistics.scoreSums,
		sequence_tokens: statistics.tokens,
		dnormalised: statistics.dnormalised,
		loss: tape.replaying ? null : (options.loss ?? null),
		dnormalised_rows: statistics.dnormalised?.rows ?? 0,
		sequences: statistics.counts.rows,
		experts: statistics.counts.width,
		topk: statistics.topk,
		sequence_shards: options.sequenceShards ?? 1,
		coefficient: options.coefficient,
		gradient_scale: options.gradientScale,
	});
}

/**
 * bias_E += rate * sign(mean(counts) - counts_E), then counts are zero: once after every optimizer step
 * (docs/spec/language-model.md §4.3).
 */
export function updateExpertBias(device: Device, bias: Tensor, counts: Tensor, rate: number): void {
	device.run("router_bias_update", { bias, counts, experts: bias.elements, rate });
}
