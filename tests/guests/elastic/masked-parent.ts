/**
 * A parent that computes what one of its submodels does, by weights alone: units that the submodel lacks have zero weights, and
 * norms over fewer live channels are made those of the live ones by a factor √(e/H) on their weights and an ε of ε·e/H.
 */

import { readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { countLayers } from "../../../src/config/hybrid-pattern.ts";
import type { Submodel } from "../../../src/guests/elastic/submodel/submodel.ts";
import type { HybridConfig, LayerDifference } from "../../../src/models/language/config.ts";
import type { HybridModel } from "../../../src/models/language/model.ts";
import { isGatedActivation } from "../../../src/native/activations.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { memoryStore } from "../../checkpoint/memory-store.ts";

type Matrix = { readonly shape: readonly number[]; readonly values: Float32Array };

/** Whether unit `index` of `total` in equal groups is among the first `kept` of them, equally many of each group. */
const lives = (index: number, total: number, groups: number, kept: number) => index % (total / groups) < kept / groups;

/** The parent's configuration, with the ε of norms over live channels. */
export function maskedConfig(config: HybridConfig, submodel: Submodel): HybridConfig {
	let mamba = 0;
	const ofLayer = new Map<number, LayerDifference>();
	for (const [index, kind] of config.pattern.entries()) {
		if (kind !== "mamba") continue;
		const share = submodel.mambaNumHeads[mamba++]! / config.mamba.heads;
		ofLayer.set(index, { mamba: { gatedNormEpsilon: config.mamba.gatedNormEpsilon * share } });
	}
	return { ...config, ofLayer, normEpsilon: (config.normEpsilon * submodel.hiddenSize) / config.hiddenSize };
}

/** The parent's weights without what the submodel lacks. */
export function maskedWeights(parent: TensorStore, config: HybridConfig, submodel: Submodel): TensorStore {
	const { hiddenSize: e } = submodel;
	const H = config.hiddenSize;
	const tensors: Record<string, Matrix> = {};
	for (const [name, { shape }] of parent.tensors) {
		tensors[name] = { shape, values: Float32Array.from(readTensor(parent, name) as Float32Array) };
	}
	const scaleBy = (name: string, factor: (row: number, column: number) => number) => {
		const { shape, values } = tensors[name]!;
		const width = values.length / shape[0]!;
		for (let i = 0; i < values.length; i++) values[i]! *= factor(Math.floor(i / width), i % width);
	};
	const norm = (name: string) => scaleBy(name, (channel) => (channel < e ? Math.sqrt(e / H) : 0));
	/** Weights of a projection back into the residual stream; a skipped layer adds nothing, nor does its bias. */
	const outward = (name: string, kept: boolean, column: (column: number) => boolean) => {
		scaleBy(name, (row, at) => (kept && row < e && column(at) ? 1 : 0));
		const bias = name.replace(/\.weight(\d*)$/, ".bias$1");
		if (tensors[bias]) scaleBy(bias, (row) => (kept && row < e ? 1 : 0));
	};
	const all = () => true;

	scaleBy("language_model.embedding.word_embeddings.weight", (_, channel) => (channel < e ? 1 : 0));
	norm("language_model.decoder.final_norm.weight");
	for (const [index, kind] of config.pattern.entries()) {
		const prefix = `language_model.decoder.layers.${index}.`;
		const at = countLayers(config.pattern.slice(0, index), kind);
		const kept = submodel.keptLayers[index]!;
		if (kind === "mamba") {
			const { heads, groups, headDim } = config.mamba;
			const live = (head: number) => lives(head, heads, groups, submodel.mambaNumHeads[at]!);
			const channel = (c: number) => live(Math.floor(c / headDim));
			const inner = heads * headDim;
			norm(`${prefix}mixer.in_proj.layer_norm_weight`);
			// Without gate and input a head gives zeros.
			scaleBy(`${prefix}mixer.in_proj.weight`, (row) => (row >= 2 * inner || channel(row % inner) ? 1 : 0));
			const share = Math.sqrt(submodel.mambaNumHeads[at]! / heads);
			scaleBy(`${prefix}mixer.norm.weight`, (c) => (channel(c) ? share : 0));
			outward(`${prefix}mixer.out_proj.weight`, kept, channel);
		} else if (kind === "attention") {
			const { heads, queryGroups, headDim } = config.attention;
			norm(`${prefix}self_attention.linear_qkv.layer_norm_weight`);
			outward(`${prefix}self_attention.linear_proj.weight`, kept, (c) =>
				lives(Math.floor(c / headDim), heads, queryGroups, submodel.numAttentionHeads[at]!),
			);
		} else if (kind === "mlp") {
			norm(`${prefix}mlp.linear_fc1.layer_norm_weight`);
			outward(`${prefix}mlp.linear_fc2.weight`, kept, all);
		} else {
			const { experts, ffnHiddenSize: f, sharedExpertSize } = config.moe;
			const width = submodel.moeFfnHiddenSize[at]!;
			norm(`${prefix}pre_mlp_layernorm.weight`);
			for (let expert = 0; expert < experts; expert++) {
				// Zero halves too where the activation is gated: the masked products are zero either way.
				if (isGatedActivation(config.mlp.activation)) {
					scaleBy(`${prefix}mlp.experts.linear_fc1.weight${expert}`, (row) => (row % f < width ? 1 : 0));
				}
				outward(`${prefix}mlp.experts.linear_fc2.weight${expert}`, kept, (c) => c < width);
			}
			if (sharedExpertSize > 0) outward(`${prefix}mlp.shared_experts.linear_fc2.weight`, kept, all);
		}
	}
	return memoryStore(tensors);
}

/** Keeps tokens of a parent from the experts that the submodel lacks. */
export function maskExperts(model: HybridModel, submodel: Submodel): void {
	for (const [at, router] of [...model.routers.values()].entries()) {
		const kept = submodel.numMoeExperts[at]!;
		router.onLogits = (logits) => {
			const values = logits.toFloat32();
			const masked = values.map((value, i) => (i % logits.width < kept ? value : -1e30));
			using changed = Tensor.from(logits.device, masked, logits.shape);
			logits.device.copy(logits, changed, logits.bytes);
		};
		const bias = router.expertBias.toFloat32().map((value, expert) => (expert < kept ? value : -1e9));
		using changed = Tensor.from(model.device, bias, [bias.length]);
		model.device.copy(router.expertBias, changed, changed.bytes);
	}
}
