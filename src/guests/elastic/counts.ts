/**
 * Parameters of an elastic model as a function of its expected sizes, with the gradient (docs/spec/elastic.md §6). Sizes are
 * expectations, so they need not be whole; of each layer the sizes of its own kind are read.
 */
import type { LayerKind } from "../../config/hybrid-pattern.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { isGatedActivation } from "../../native/activations.ts";

/** Sizes of a model; lists have an entry for every layer of the main part. */
export interface Sizes {
	hidden: number;
	readonly mambaHeads: number[];
	readonly ffn: number[];
	readonly experts: number[];
	readonly heads: number[];
	/** 1: the layer is there; 0: it is left out. */
	readonly keep: number[];
}

export function emptySizes(layers: number): Sizes {
	const zeros = () => Array.from({ length: layers }, () => 0);
	return { hidden: 0, mambaHeads: zeros(), ffn: zeros(), experts: zeros(), heads: zeros(), keep: zeros() };
}

/** The parent's own sizes. */
export function parentSizes({ pattern, hiddenSize, mamba, moe, attention }: HybridConfig): Sizes {
	const every = (size: number) => pattern.map(() => size);
	return {
		hidden: hiddenSize,
		mambaHeads: every(mamba.heads),
		ffn: every(moe.ffnHiddenSize),
		experts: every(moe.experts),
		heads: every(attention.heads),
		keep: every(1),
	};
}

/** total: every parameter; active: of routed experts those of one token. */
export type CountTarget = "total" | "active";
/** Megatron's formula has 8 Mamba groups whatever the model has, a shared expert as wide as routed ones, and no router. */
export type CountRule = "exact" | "megatron";

/** A function's value and its gradient for the sizes. */
export interface Differentiable {
	readonly value: number;
	readonly gradient: Sizes;
}

export function countParameters(
	model: HybridConfig,
	sizes: Sizes,
	target: CountTarget,
	rule: CountRule = "exact",
): Differentiable {
	const h = sizes.hidden;
	const gradient = emptySizes(model.pattern.length);
	const vocabulary = (model.tieWordEmbeddings ? 1 : 2) * model.paddedVocabularySize;
	let value = vocabulary * h + h;
	gradient.hidden = vocabulary + 1;
	for (const [index, kind] of model.pattern.entries()) {
		const count = layerCount[kind];
		if (count === undefined) throw new RangeError(`No sizes of ${kind} layers are known to an elastic model.`);
		const layer = count(model, sizes, index, target, rule);
		const keep = sizes.keep[index]!;
		value += keep * layer.value;
		gradient.keep[index] = layer.value;
		gradient.hidden += keep * layer.hidden;
		gradient.mambaHeads[index] = keep * (layer.mambaHeads ?? 0);
		gradient.ffn[index] = keep * (layer.ffn ?? 0);
		gradient.experts[index] = keep * (layer.experts ?? 0);
		gradient.heads[index] = keep * (layer.heads ?? 0);
	}
	return { value, gradient };
}

/** A layer's parameters and their derivatives by the sizes that it has. */
interface LayerCount {
	readonly value: number;
	readonly hidden: number;
	readonly mambaHeads?: number;
	readonly ffn?: number;
	readonly experts?: number;
	readonly heads?: number;
}

type CountLayer = (
	model: HybridConfig,
	sizes: Sizes,
	index: number,
	target: CountTarget,
	rule: CountRule,
) => LayerCount;

const mambaCount: CountLayer = ({ mamba }, { hidden: h, mambaHeads }, index, _, rule) => {
	const n = mambaHeads[index]!;
	const groups = rule === "megatron" ? 8 : mamba.groups;
	const inner = n * mamba.headDim;
	const state = 2 * groups * mamba.stateDim;
	const perChannel = mamba.convKernel + 1;
	const width = 2 * inner + state + n;
	return {
		value: 3 * n + h + h * width + perChannel * (inner + state) + inner + inner * h,
		hidden: 1 + width + inner,
		mambaHeads: 3 + h * (3 * mamba.headDim + 1) + (perChannel + 1) * mamba.headDim,
	};
};

const attentionCount: CountLayer = ({ attention }, { hidden: h, heads }, index) => {
	const { headDim: d, queryGroups: g } = attention;
	const n = heads[index]!;
	return { value: h + 2 * h * d * (n + g), hidden: 1 + 2 * d * (n + g), heads: 2 * h * d };
};

const denseCount: CountLayer = ({ mlp }, { hidden: h }) => {
	const matrices = isGatedActivation(mlp.activation) ? 3 : 2;
	return { value: h + matrices * h * mlp.ffnHiddenSize, hidden: 1 + matrices * mlp.ffnHiddenSize };
};

const expertCount: CountLayer = ({ moe, mlp }, { hidden: h, ffn, experts }, index, target, rule) => {
	const matrices = isGatedActivation(mlp.activation) ? 3 : 2;
	const f = ffn[index]!;
	const e = experts[index]!;
	const met = target === "active" ? moe.topk : e;
	const byExperts = target === "active" ? 0 : matrices * f * h;
	const shared = matrices * moe.sharedExpertSize;
	if (rule === "megatron") {
		return {
			value: h + matrices * f * h * met + f * shared,
			hidden: 1 + matrices * f * met,
			ffn: matrices * h * met + shared,
			experts: byExperts,
		};
	}
	return {
		value: h + matrices * f * h * met + h * shared + h * e,
		hidden: 1 + matrices * f * met + shared + e,
		ffn: matrices * h * met,
		experts: byExperts + h,
	};
};

/** Absent kinds have no place in an elastic model (config/checks/elastic.ts). */
const layerCount: Readonly<Partial<Record<LayerKind, CountLayer>>> = {
	mamba: mambaCount,
	attention: attentionCount,
	mlp: denseCount,
	moe: expertCount,
};
