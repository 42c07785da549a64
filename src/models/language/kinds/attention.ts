/**
 * A causal self-attention layer (docs/spec/language-model.md §3): x_TH → attention(rms(x_TH)), without the residual. Tensor
 * parallelism shards key-value heads with their query heads.
 */

import { keysOfWindow } from "../../../config/per-layer.ts";
import type { TrainingConfiguration } from "../../../config/schema.ts";
import { reduceScatterSequence } from "../../../parallel/index.ts";
import { gated, headNorm, type ResidualSum, splitGate, type Tape, type Tensor } from "../../../tensor/index.ts";
import { philoxKey } from "../../initialise.ts";
import type { ParameterSpec } from "../../parameter-spec.ts";
import type { HybridConfig } from "../config.ts";
import type { LayerContext } from "../layer-context.ts";
import { masked } from "../masks.ts";
import { addOutputBias, project } from "../projection.ts";
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

export const attention: Kind = {
	title: "attention",
	scopes: ["self_attention", "input_layernorm"],
	routes: false,
	parameters,
	postNorm: behind,
	forward,
	flops,
	megatronFlops,
	ownSizes: (c) => ({ attention: { heads: c.numAttentionHeads, window: keysOfWindow(c.windowSize) } }),
};

/** The logit of every query head that joins its softmax's denominators. */
const sinks = "self_attention.core_attention.softmax_offset";

function parameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, attention } = config;
	const { inward, outward } = distributions(config);
	const { heads, queryGroups, headDim, outputGate } = attention;
	// By group: its query heads, their gates if there are any, a key head, a value head.
	const fused = ((outputGate ? 2 : 1) * heads + 2 * queryGroups) * headDim;
	return [
		...hiddenNorm(config, "self_attention.linear_qkv.layer_norm_weight"),
		{
			name: "self_attention.linear_qkv.weight",
			shape: [fused, h],
			initialisation: inward,
			shard: rows,
			parts: [...new Array(outputGate ? 2 : 1).fill((heads / queryGroups) * headDim), headDim, headDim],
		},
		{
			name: "self_attention.linear_proj.weight",
			shape: [h, heads * headDim],
			initialisation: outward,
			shard: columns,
		},
		...biases(config, "self_attention.linear_qkv.bias", fused, rows),
		...(attention.qkNorm
			? ["q", "k"].map((part) => normWeight(config, `self_attention.${part}_layernorm.weight`, headDim))
			: []),
		...biases(config, "self_attention.linear_proj.bias", h, replicated),
		...postNorm(config, behind),
		...(attention.sinks ? [{ name: sinks, shape: [attention.heads], initialisation: inward, shard: rows }] : []),
	];
}

function forward(tape: Tape, context: LayerContext, x: ResidualSum): Tensor {
	const { config, sequences, mixing, random } = context;
	const { attention: shape } = config;
	const { tp } = context.parallel;
	using u = normed(tape, context, x, "self_attention.linear_qkv.layer_norm_weight");
	using everyToken = everyRanksTokens(tape, context, u.y);
	const masks = context.layerMasks?.attention;
	using everyHead = project(tape, context, everyToken.y, "self_attention.linear_qkv.weight");
	using whole = masked(tape, everyHead, masks?.projection);
	everyToken.drop();
	u.drop();
	const queryHeads = shape.heads / tp.size;
	const heads = { queryHeads, keyHeads: shape.queryGroups / tp.size, headDim: shape.headDim };
	const [first, second] = shape.outputGate ? splitGate(tape, whole, heads) : [whole.share(), null];
	using projected = first;
	using gate = second;
	using normalised = shape.qkNorm
		? headNorm(tape, projected, { ...heads, ...headWeights(context) })
		: projected.share();
	using qkv = turned(tape, context, normalised, heads);
	using attended = runModule(tape, config, "core_attn", [qkv], (on, fused) => {
		using ofHeads = mixing.attention(on, fused, {
			...heads,
			sequences,
			mask: "causal",
			window: shape.window,
			softmaxScale: shape.softmaxScale,
			sinks: shape.sinks ? context.weights(sinks) : null,
			dropout: tape.training ? shape.dropout : 0,
			dropoutSeed: philoxKey(random.key, `${random.place}.attention_dropout`),
			firstToken: random.tokens.first,
			firstHead: tp.rank * queryHeads,
			fullHeads: shape.heads,
		});
		return masked(on, ofHeads, masks?.attended);
	});
	using weighed = gate ? gated(tape, attended.y, gate, "sigmoid") : attended.y.share();
	context.probe("heads")?.(weighed);
	const output = "self_attention.linear_proj.weight";
	using partial = project(tape, context, weighed, output);
	attended.drop();
	return addOutputBias(tape, context, reduceScatterSequence(tape, partial, tp), output);
}

/** This rank's heads. */
interface HeadCounts {
	readonly queryHeads: number;
	readonly keyHeads: number;
	readonly headDim: number;
}

/** Query and key heads turned by their tokens' positions: by those of one axis after another where there are several. */
function turned(tape: Tape, context: LayerContext, qkv: Tensor, heads: HeadCounts): Tensor {
	const { axes, mixing, sequences } = context;
	const rope = ropeOf(context.config.attention);
	if (rope === null) return qkv.share();
	const frequencies = rope.scaling ? context.ropeFrequencies : null;
	if (axes === null) return mixing.rope(tape, qkv, { ...heads, ...rope, frequencies, sequences });
	return axes.positions.reduce((before, firstPositions, axis) => {
		using _before = before;
		const place = { sequences: axes.tokens, firstPositions, frequencies: axes.frequencies[axis]! };
		return mixing.rope(tape, before, { ...heads, ...rope, ...place });
	}, qkv.share());
}

function ropeOf({ rope, window, localRopeBase }: HybridConfig["attention"]) {
	return rope && window !== null && localRopeBase !== null
		? { ...rope, base: localRopeBase, scaling: null, amplitude: 1 }
		: rope;
}

function headWeights({ config, weights }: LayerContext) {
	return {
		query: weights("self_attention.q_layernorm.weight"),
		key: weights("self_attention.k_layernorm.weight"),
		epsilon: config.normEpsilon,
		zeroCentred: config.zeroCentredNorms,
	};
}

function flops(c: TrainingConfiguration): number {
	const { hiddenSize: h, numAttentionHeads: nq, numQueryGroups: ng, kvChannels: d } = c;
	const window = Math.min(keysOfWindow(c.windowSize) ?? c.seqLength, c.seqLength);
	const keys = window - window ** 2 / (2 * c.seqLength);
	return 2 * h * ((c.attentionOutputGate ? 2 : 1) * nq + 2 * ng) * d + 4 * keys * nq * d + 2 * nq * d * h;
}

function megatronFlops(c: TrainingConfiguration, tokens: number): number {
	const h = c.hiddenSize;
	const projection = (c.kvChannels * c.numAttentionHeads) / h;
	const pairs = tokens * c.seqLength;
	const gate = c.attentionOutputGate ? h / 2 : 0;
	const projections = h + gate + (h * c.numQueryGroups) / c.numAttentionHeads;
	return 4 * tokens * h * projection * projections + 2 * pairs * h * projection;
}
