/**
 * Names and shapes of NemotronH's tensors: Megatron's logical ones and Hugging Face's (docs/spec/language-model.md §10,
 * docs/spec/checkpoint.md §4.1–§4.2). A pure plan that reads no files.
 */

import { type LayerKind, layerSymbols, parsePattern } from "../../../config/hybrid-pattern.ts";
import { modelOfLayer } from "../../../config/per-layer.ts";
import { UserError } from "../../../system/errors.ts";
import type { CorrespondenceBuilder } from "../../mapping.ts";
import {
	addQueryKeyValue,
	addVocabulary,
	type LanguageModelConfiguration,
	type NameOptions,
	type Spelling,
} from "./family.ts";
export const spellings = {
	published: { base: "backbone.", head: "", experts: "separate" },
	transformers: { base: "model.", head: "", experts: "packed" },
} as const satisfies Record<string, Spelling>;

export type SpellingName = keyof typeof spellings;

/** The spelling of a folder's tensor names, or null if no embedding of NemotronH is among them. */
export function detectNemotronH(names: Iterable<string>): Spelling | null {
	let base: string | null = null;
	let experts: Spelling["experts"] = "separate";
	let mtp = "";
	for (const name of names) {
		mtp = /^(.+\.)mtp\.layers\.\d+\./.exec(name)?.[1] ?? mtp;
		const embedding = /^(.*)embeddings\.weight$/.exec(name);
		if (embedding && /^((.*\.)?(backbone|model)\.)$/.test(embedding[1]!)) base = embedding[1]!;
		if (name.endsWith(".mixer.experts.up_proj") || name.endsWith(".mixer.experts.down_proj")) experts = "packed";
	}
	if (base === null) return null;
	return { base, head: base.replace(/(backbone|model)\.$/, ""), experts, ...(mtp === "" ? {} : { mtp }) };
}

/**
 * Compares the layers and experts of a config.json with the tensors that are there, before names are made from them. A
 * config.json that passes has at most a few times as many names as tensors.
 */
export function requireCounts(
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	stored: ReadonlyMap<string, { readonly shape: readonly number[] }>,
	path: string,
): void {
	const { hybridLayerPattern: pattern } = configuration;
	const tooMany = (key: string, count: number) => {
		throw new UserError(`${path}: ${key} names ${count}, too many for the ${stored.size} tensors that are there.`);
	};
	if (pattern.length > stored.size) tooMany("hybrid_override_pattern (layers_block_type)", pattern.length);
	const { moe: symbol } = layerSymbols;
	const first = pattern.indexOf(symbol);
	if (first < 0) return;
	const [main = "", depth = ""] = pattern.split("/");
	const { numExperts: experts } = modelOfLayer(configuration, first);
	const place =
		first < main.length
			? `${spelling.base}layers.${first}.`
			: `${spelling.mtp ?? ""}mtp.layers.${depth.indexOf(symbol)}.`;
	if (spelling.experts === "packed") {
		const packed = `${place}mixer.experts.up_proj`;
		const found = stored.get(packed)?.shape[0];
		if (found !== undefined && found !== experts) {
			throw new UserError(`${path}: n_routed_experts is ${experts}, tensor ${packed} holds ${found}.`);
		}
		if (found === undefined && experts > stored.size) tooMany("n_routed_experts", experts);
		return;
	}
	const listed = configuration.numExpertsPerLayer?.reduce((sum, size) => sum + size, 0) ?? null;
	const all = listed ?? (pattern.split(symbol).length - 1) * experts;
	if (all > stored.size) tooMany(listed === null ? "n_routed_experts" : "block_configs", listed ?? experts);
}

/** Adds a language model's tensors, of both formats, to those of other modules in `builder`. */
export function addNemotronH(
	builder: CorrespondenceBuilder,
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	options: NameOptions,
): void {
	const prefix = "language_model.";
	const vocabulary = (logical: string, foreign: string) =>
		addVocabulary(builder, configuration, options, { logical, foreign });
	vocabulary(`${prefix}embedding.word_embeddings.weight`, `${spelling.base}embeddings.weight`);
	const { segments, mtp } = parsePattern(configuration.hybridLayerPattern);
	segments.flat(2).forEach((kind, index) => {
		const logical = `${prefix}decoder.layers.${index}.`;
		const foreign = `${spelling.base}layers.${index}.`;
		layer(builder, modelOfLayer(configuration, index), spelling, kind, logical, foreign);
	});
	builder.same(`${prefix}decoder.final_norm.weight`, `${spelling.base}norm_f.weight`, [configuration.hiddenSize]);
	if (configuration.untieEmbeddingsAndOutputWeights) {
		vocabulary(`${prefix}output_layer.weight`, `${spelling.head}lm_head.weight`);
	}
	const depths = configuration.mtpUseRepeatedLayer ? Math.min(1, mtp?.depths ?? 0) : (mtp?.depths ?? 0);
	for (let depth = 0; depth < depths; depth++) {
		addDepth(builder, configuration, spelling, depth, mtp!.layers);
	}
}

/** An MTP depth: its layers are numbered through all depths, and its own tensors stand with its first and last layer. */
function addDepth(
	builder: CorrespondenceBuilder,
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	depth: number,
	layers: readonly LayerKind[],
): void {
	const { hiddenSize: h } = configuration;
	const logical = `language_model.mtp.layers.${depth}.`;
	const foreign = (at: number) => `${spelling.mtp ?? ""}mtp.layers.${depth * layers.length + at}.`;
	const same = (name: string, at: number, shape: readonly number[]) =>
		builder.same(logical + name, foreign(at) + name, shape);
	same("enorm.weight", 0, [h]);
	same("hnorm.weight", 0, [h]);
	same("eh_proj.weight", 0, [h, 2 * h]);
	layers.forEach((kind, at) => {
		layer(builder, configuration, spelling, kind, `${logical}mtp_model_layer.layers.${at}.`, foreign(at));
	});
	same("final_layernorm.weight", layers.length - 1, [h]);
}

function layer(
	builder: CorrespondenceBuilder,
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	kind: LayerKind,
	logical: string,
	foreign: string,
): void {
	const { hiddenSize: h } = configuration;
	const same = (mine: string, theirs: string, shape: readonly number[]) =>
		builder.same(logical + mine, foreign + theirs, shape);
	switch (kind) {
		case "mamba":
			mamba(configuration, same);
			break;
		case "attention":
			same("self_attention.linear_qkv.layer_norm_weight", "norm.weight", [h]);
			addQueryKeyValue(builder, configuration, "weight", {
				logical: `${logical}self_attention.`,
				foreign: `${foreign}mixer.`,
			});
			same("self_attention.linear_proj.weight", "mixer.o_proj.weight", [
				h,
				configuration.numAttentionHeads * configuration.kvChannels,
			]);
			break;
		case "mlp":
			same("mlp.linear_fc1.layer_norm_weight", "norm.weight", [h]);
			same("mlp.linear_fc1.weight", "mixer.up_proj.weight", [configuration.ffnHiddenSize, h]);
			same("mlp.linear_fc2.weight", "mixer.down_proj.weight", [h, configuration.ffnHiddenSize]);
			break;
		case "moe":
			same("pre_mlp_layernorm.weight", "norm.weight", [h]);
			mixtureOfExperts(builder, configuration, spelling, logical, foreign, same);
			break;
		default:
			throw new UserError(`${builder.path}: NemotronH has no layers ${layerSymbols[kind]}.`);
	}
}

type Same = (logical: string, foreign: string, shape: readonly number[]) => void;

function mamba(configuration: LanguageModelConfiguration, same: Same): void {
	const { hiddenSize: h, mambaNumHeads: heads } = configuration;
	const inner = heads * configuration.mambaHeadDim;
	const channels = inner + 2 * configuration.mambaNumGroups * configuration.mambaStateDim;
	same("mixer.in_proj.layer_norm_weight", "norm.weight", [h]);
	same("mixer.in_proj.weight", "mixer.in_proj.weight", [inner + channels + heads, h]);
	same("mixer.conv1d_weight", "mixer.conv1d.weight", [channels, 1, configuration.mambaConvKernelDim]);
	same("mixer.conv1d_bias", "mixer.conv1d.bias", [channels]);
	for (const vector of ["A_log", "D", "dt_bias"]) same(`mixer.${vector}`, `mixer.${vector}`, [heads]);
	same("mixer.norm.weight", "mixer.norm.weight", [inner]);
	same("mixer.out_proj.weight", "mixer.out_proj.weight", [h, inner]);
}

function mixtureOfExperts(
	builder: CorrespondenceBuilder,
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	logical: string,
	foreign: string,
	same: Same,
): void {
	const { hiddenSize: h, numExperts: experts, moeFfnHiddenSize: f } = configuration;
	const { moeSharedExpertIntermediateSize: shared, moeLatentSize: latent = null } = configuration;
	const width = latent ?? h;
	if (latent !== null) {
		same("mlp.fc1_latent_proj.weight", "mixer.fc1_latent_proj.weight", [latent, h]);
		same("mlp.fc2_latent_proj.weight", "mixer.fc2_latent_proj.weight", [h, latent]);
	}
	same("mlp.router.weight", "mixer.gate.weight", [experts, h]);
	if (configuration.moeRouterEnableExpertBias) {
		same("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias", [experts]);
	}
	for (const [fc, projection, shape] of [
		["linear_fc1", "up_proj", [f, width]],
		["linear_fc2", "down_proj", [width, f]],
	] as const) {
		const packed = `${foreign}mixer.experts.${projection}`;
		if (spelling.experts === "packed") builder.addForeign(packed, [experts, ...shape]);
		for (let expert = 0; expert < experts; expert++) {
			const mine = `mlp.experts.${fc}.weight${expert}`;
			if (spelling.experts === "separate") {
				same(mine, `mixer.experts.${expert}.${projection}.weight`, shape);
			} else {
				builder.addLogical(logical + mine, shape);
				builder.rows({
					logical: logical + mine,
					foreign: packed,
					width: shape[1],
					rows: shape[0],
					foreignRow: expert * shape[0],
				});
			}
		}
	}
	if (shared > 0) {
		same("mlp.shared_experts.linear_fc1.weight", "mixer.shared_experts.up_proj.weight", [shared, h]);
		same("mlp.shared_experts.linear_fc2.weight", "mixer.shared_experts.down_proj.weight", [h, shared]);
	}
}
