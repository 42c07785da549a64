/**
 * A layer of causal multi-latent attention (docs/spec/families.md §2.4): x_TH → attention(rms(x_TH)), without the residual. Queries,
 * and keys with values, are projected up from latents of low rank; a key has columns by head, and rotated ones that all heads share.
 * Each rank computes its own tokens' latents; tensor parallelism gathers them and shards the heads.
 */

import type { TrainingConfiguration } from "../../../config/schema.ts";
import { gatherSequence, reduceScatterSequence } from "../../../parallel/index.ts";
import {
	attention,
	joinColumns,
	type LatentHeads,
	latentHeads,
	type ResidualSum,
	rmsNorm,
	splitColumns,
	type Tape,
	type Tensor,
} from "../../../tensor/index.ts";
import { philoxKey } from "../../initialise.ts";
import type { ParameterSpec } from "../../parameter-spec.ts";
import type { HybridConfig } from "../config.ts";
import type { LayerContext } from "../layer-context.ts";
import { addOutputBias, project, weightWithAdapter } from "../projection.ts";
import { everyRanksTokens, normed, runModule } from "../recomputed-module.ts";
import {
	biases,
	columns,
	distributions,
	hiddenNorm,
	type Kind,
	normWeight,
	postNorm,
	replicated,
	rows,
} from "./kind.ts";

const behind = "self_attention.linear_proj.post_layernorm.weight";

export const latentAttention: Kind = {
	title: "multi-latent attention",
	scopes: ["self_attention", "input_layernorm"],
	postNorm: behind,
	routes: false,
	parameters,
	forward,
	flops,
	megatronFlops,
	ownSizes: ({ numAttentionHeads }) => ({ attention: { heads: numAttentionHeads } }),
};

const queryDown = "self_attention.linear_q_down_proj.weight";
const queryUp = "self_attention.linear_q_up_proj.weight";
const queryWhole = "self_attention.linear_q_proj.weight";
const keyValueDown = "self_attention.linear_kv_down_proj.weight";
const keyValueUp = "self_attention.linear_kv_up_proj.weight";
const output = "self_attention.linear_proj.weight";

/** Name of the norm of the latent that a projection reads. */
const normOf = (projection: string) => projection.replace(/weight$/, "layer_norm_weight");

function parameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, attention, latent } = config;
	const { norms, queryRank, keyValueRank, contentDim, positionDim, valueDim } = latent!;
	const { inward, outward } = distributions(config);
	const weight = (name: string, shape: readonly [number, number], shard: ParameterSpec["shard"]) => ({
		...{ name, shape, initialisation: inward, shard },
	});
	const up = (name: string, width: number, rank: number) => [
		...(norms ? [normWeight(config, normOf(name), rank)] : []),
		weight(name, [attention.heads * width, rank], rows),
	];
	const queryWidth = contentDim + positionDim;
	return [
		...hiddenNorm(config, "input_layernorm.weight"),
		...(queryRank === null
			? [weight(queryWhole, [attention.heads * queryWidth, h], rows)]
			: [weight(queryDown, [queryRank, h], replicated), ...up(queryUp, queryWidth, queryRank)]),
		weight(keyValueDown, [keyValueRank + positionDim, h], replicated),
		...up(keyValueUp, contentDim + valueDim, keyValueRank),
		{ ...weight(output, [h, attention.heads * valueDim], columns), initialisation: outward },
		...biases(config, "self_attention.linear_proj.bias", h, replicated),
		...postNorm(config, behind),
	];
}

function forward(tape: Tape, context: LayerContext, x: ResidualSum): Tensor {
	const { config, mixing, random, sequences } = context;
	const { attention: shape } = config;
	const options = config.latent!;
	const { tp } = context.parallel;
	const sizes = headsOf(context);
	using u = normed(tape, context, x, "input_layernorm.weight");
	using everyToken = options.queryRank === null ? everyRanksTokens(tape, context, u.y) : null;
	const [query, keyValue, unturned] = enter(tape, context, u.y, everyToken?.y ?? null);
	using entering = query;
	using latent = keyValue;
	using position = unturned;
	if (mixing.latentStep) {
		using q = queries(tape, context, entering);
		using turned = turn(tape, context, position, 1);
		using weight = weightWithAdapter(context, keyValueUp);
		const { softmaxScale } = options;
		using attended = mixing.latentStep({ q, latent, position: turned }, { ...sizes, weight, softmaxScale });
		return leave(tape, context, attended);
	}
	using fused = runModule(tape, config, "mla_up_proj", [entering, latent, position], (on, ...from) =>
		fuseHeads(on, context, ...(from as [Tensor, Tensor, Tensor])),
	);
	using attended = runModule(tape, config, "core_attn", [fused.y], (on, qkv) =>
		(mixing.latentAttention ?? attention)(on, qkv, {
			queryHeads: sizes.heads,
			keyHeads: sizes.heads,
			headDim: sizes.contentDim + sizes.positionDim,
			valueDim: sizes.valueDim,
			sequences,
			mask: "causal",
			softmaxScale: options.softmaxScale,
			dropout: tape.training ? shape.dropout : 0,
			dropoutSeed: philoxKey(random.key, `${random.place}.attention_dropout`),
			firstToken: random.tokens.first,
			firstHead: tp.rank * sizes.heads,
			fullHeads: shape.heads,
		}),
	);
	context.probe("heads")?.(attended.y);
	const y = leave(tape, context, attended.y);
	// A value that is recomputed from another recomputed value is dropped before it, and so comes back after it.
	for (const recomputed of [attended, fused, everyToken, u]) recomputed?.drop();
	return y;
}

/** The heads of this rank. */
function headsOf({ config, parallel }: LayerContext): LatentHeads {
	const { contentDim, positionDim, valueDim } = config.latent!;
	return { heads: config.attention.heads / parallel.tp.size, contentDim, positionDim, valueDim };
}

/**
 * From this rank's tokens u_(T/tp)H, of all tokens: the queries' latent (`everyToken`, where they have none), the latent of keys and
 * values, and the keys' shared columns, not turned yet.
 */
function enter(tape: Tape, context: LayerContext, u: Tensor, everyToken: Tensor | null): [Tensor, Tensor, Tensor] {
	const { keyValueRank, positionDim } = context.config.latent!;
	using joined = project(tape, context, u, keyValueDown);
	const [content, own] = splitColumns(tape, joined, [keyValueRank, positionDim]);
	using unnormed = content!;
	using position = own!;
	using latent = normedLatent(tape, context, unnormed, keyValueUp);
	if (everyToken !== null) {
		const [every, positions] = gatherTogether(tape, context, [latent, position]);
		return [everyToken.share(), every!, positions!];
	}
	using down = project(tape, context, u, queryDown);
	using query = normedLatent(tape, context, down, queryUp);
	return gatherTogether(tape, context, [query, latent, position]) as [Tensor, Tensor, Tensor];
}

/** The latent that the projection `up` reads. */
function normedLatent(tape: Tape, { config, weights }: LayerContext, x: Tensor, up: string): Tensor {
	const { norms, normEpsilon } = config.latent!;
	const { zeroCentredNorms: zeroCentred } = config;
	return norms ? rmsNorm(tape, x, weights(normOf(up)), normEpsilon, { zeroCentred }) : x.share();
}

/** Columns of this rank's tokens → those of all tokens, in one exchange. */
function gatherTogether(tape: Tape, { parallel: { tp } }: LayerContext, parts: readonly Tensor[]): Tensor[] {
	if (tp.size === 1) return parts.map((part) => part.share());
	using joined = joinColumns(tape, parts);
	using every = gatherSequence(tape, joined, tp);
	return splitColumns(
		tape,
		every,
		parts.map(({ width }) => width),
	);
}

/** Turned queries of this rank's heads, from what enter() gives. */
function queries(tape: Tape, context: LayerContext, entering: Tensor): Tensor {
	const { queryRank } = context.config.latent!;
	using q = project(tape, context, entering, queryRank === null ? queryWhole : queryUp);
	return turn(tape, context, q, headsOf(context).heads);
}

/** Turns the last columns of every head by its token's position. */
function turn(tape: Tape, context: LayerContext, x: Tensor, heads: number): Tensor {
	const { config, sequences, mixing, ropeFrequencies: frequencies } = context;
	const { rope, positionDim: rotated } = config.latent!;
	return mixing.ropeLast(tape, x, { ...rope, frequencies, sequences, heads, rotated });
}

/** [q, k, v] of this rank's heads. */
function fuseHeads(tape: Tape, context: LayerContext, entering: Tensor, latent: Tensor, unturned: Tensor): Tensor {
	using q = queries(tape, context, entering);
	using position = turn(tape, context, unturned, 1);
	context.mixing.keepLatent?.(latent, position);
	using kv = project(tape, context, latent, keyValueUp);
	return latentHeads(tape, { q, kv, position }, headsOf(context));
}

function leave(tape: Tape, context: LayerContext, attended: Tensor): Tensor {
	using partial = project(tape, context, attended, output);
	return addOutputBias(tape, context, reduceScatterSequence(tape, partial, context.parallel.tp), output);
}

/** Elements of the projections' weights. */
function weightsOf(model: TrainingConfiguration): number {
	const { hiddenSize: h, numAttentionHeads: heads, qLoraRank: a, kvLoraRank: c } = model;
	const { qkHeadDim: content, qkPosEmbHeadDim: position, vHeadDim: value } = model;
	const queryWidth = heads * (content + position);
	const query = a === null ? h * queryWidth : a * (h + queryWidth);
	return query + h * (c + position) + c * heads * (content + value) + heads * value * h;
}

function flops(c: TrainingConfiguration): number {
	const pairs = c.seqLength * c.numAttentionHeads * (c.qkHeadDim + c.qkPosEmbHeadDim + c.vHeadDim);
	return 2 * weightsOf(c) + pairs;
}

/** The latents' norms count as a product with a row. */
function megatronFlops(c: TrainingConfiguration, tokens: number): number {
	return tokens * (flops(c) + 2 * ((c.qLoraRank ?? 0) + c.kvLoraRank));
}
