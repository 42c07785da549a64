/** Tensors of families with two blocks a layer: Megatron's logical names and Hugging Face's (docs/spec/families.md §3). */
import { parsePattern } from "../../../config/hybrid-pattern.ts";
import { UserError } from "../../../system/errors.ts";
import type { CorrespondenceBuilder } from "../../mapping.ts";
import type { LanguageModelConfiguration } from "../configuration.ts";
import type { NameOptions, Spelling } from "./family.ts";

/** The spelling of a folder with tensors …embed_tokens.weight and …layers.N.self_attn; null: the names are of another form. */
export function detectDecoder(names: Iterable<string>): Spelling | null {
	const bases = new Set<string>();
	let embedded: string | null = null;
	for (const name of names) {
		embedded = /^((?:.*\.)?model\.)embed_tokens\.weight$/.exec(name)?.[1] ?? embedded;
		const layers = /^(.*?)layers\.\d+\.self_attn\.q_proj\.weight$/.exec(name)?.[1];
		if (layers !== undefined) bases.add(layers);
	}
	if (embedded === null || !bases.has(embedded)) return null;
	return { base: embedded, head: embedded.replace(/model\.$/, ""), experts: "separate" };
}

/** Compares a config.json's layers and experts with the tensors that are there, before names are made from them. */
export function requireDecoderCounts(
	{ numLayers, numExperts }: LanguageModelConfiguration,
	_: Spelling,
	stored: ReadonlyMap<string, unknown>,
	path: string,
): void {
	const tooMany = (
		[
			["num_hidden_layers", numLayers / 2],
			["num_experts", numExperts],
		] as const
	).find(([, count]) => count > stored.size);
	if (tooMany === undefined) return;
	const [key, count] = tooMany;
	throw new UserError(`${path}: ${key} names ${count}, too many for the ${stored.size} tensors that are there.`);
}

export function addDecoderNames(
	builder: CorrespondenceBuilder,
	c: LanguageModelConfiguration,
	{ base, head }: Spelling,
	{ paddedVocabularySize = c.vocabSize }: NameOptions,
): void {
	const { hiddenSize: h, vocabSize: v } = c;
	const vocabulary = (logical: string, foreign: string) => {
		builder.addLogical(logical, [paddedVocabularySize, h]);
		builder.addForeign(foreign, [v, h]);
		builder.rows({ logical, foreign, width: h, rows: v });
		if (paddedVocabularySize > v) builder.padded.add(logical);
	};
	vocabulary("language_model.embedding.word_embeddings.weight", `${base}embed_tokens.weight`);
	parsePattern(c.hybridLayerPattern)
		.segments.flat(2)
		.forEach((kind, index) => {
			const names: LayerNames = {
				...{ builder, c },
				logical: `language_model.decoder.layers.${index}.`,
				foreign: `${base}layers.${Math.floor(index / 2)}.`,
			};
			if (kind === "attention") attention(names);
			else if (kind === "moe") experts(names);
			else denseMlp(names);
		});
	builder.same("language_model.decoder.final_norm.weight", `${base}norm.weight`, [h]);
	if (c.untieEmbeddingsAndOutputWeights) vocabulary("language_model.output_layer.weight", `${head}lm_head.weight`);
}

/** Where the tensors of a layer go. */
interface LayerNames {
	readonly builder: CorrespondenceBuilder;
	readonly c: LanguageModelConfiguration;
	readonly logical: string;
	readonly foreign: string;
}

/** Rows of linear_qkv: per group its query heads, then one key head, one value head (docs/spec/checkpoint.md §4.2). */
function attention({ builder, c, logical, foreign }: LayerNames): void {
	const { hiddenSize: h, numAttentionHeads: heads, numQueryGroups: groups, kvChannels: d } = c;
	const [mine, theirs] = [`${logical}self_attention.`, `${foreign}self_attn.`];
	builder.same(`${mine}linear_qkv.layer_norm_weight`, `${foreign}input_layernorm.weight`, [h]);
	const queryRows = (heads / groups) * d;
	const groupRows = queryRows + 2 * d;
	const fused = (end: string, width: number) => {
		const shape = (rows: number) => (end === "bias" ? [rows] : [rows, width]);
		const name = `${mine}linear_qkv.${end}`;
		builder.addLogical(name, shape(groups * groupRows));
		for (const [part, rows, logicalRow] of [
			["q", queryRows, 0],
			["k", d, queryRows],
			["v", d, queryRows + d],
		] as const) {
			const other = `${theirs}${part}_proj.${end}`;
			builder.addForeign(other, shape(groups * rows));
			const place = { count: groups, logicalRow, logicalStride: groupRows };
			builder.rows({ logical: name, foreign: other, width, rows, ...place });
		}
	};
	fused("weight", h);
	if (c.addBiasLinear || c.addQkvBias) fused("bias", 1);
	builder.same(`${mine}linear_proj.weight`, `${theirs}o_proj.weight`, [h, heads * d]);
	if (c.addBiasLinear) builder.same(`${mine}linear_proj.bias`, `${theirs}o_proj.bias`, [h]);
	if (!c.qkLayernorm) return;
	for (const part of ["q", "k"]) {
		builder.same(`${mine}${part}_layernorm.weight`, `${theirs}${part}_norm.weight`, [d]);
	}
}

function denseMlp(names: LayerNames): void {
	const { builder, c, logical, foreign } = names;
	builder.same(`${logical}mlp.linear_fc1.layer_norm_weight`, `${foreign}post_attention_layernorm.weight`, [
		c.hiddenSize,
	]);
	gatedMlp(names, "mlp.", "", "mlp.", c.ffnHiddenSize);
}

function experts(names: LayerNames): void {
	const { builder, c, logical, foreign } = names;
	builder.same(`${logical}pre_mlp_layernorm.weight`, `${foreign}post_attention_layernorm.weight`, [c.hiddenSize]);
	builder.same(`${logical}mlp.router.weight`, `${foreign}mlp.gate.weight`, [c.numExperts, c.hiddenSize]);
	for (let expert = 0; expert < c.numExperts; expert++) {
		gatedMlp(names, "mlp.experts.", String(expert), `mlp.experts.${expert}.`, c.moeFfnHiddenSize);
	}
}

/** fc1 holds the gate's rows, then the linear half's. */
function gatedMlp(
	{ builder, c, logical, foreign }: LayerNames,
	mine: string,
	number: string,
	theirs: string,
	f: number,
) {
	const first = (end: string, width: number) => {
		const shape = (rows: number) => (end === "bias" ? [rows] : [rows, width]);
		const name = `${logical}${mine}linear_fc1.${end}${number}`;
		builder.addLogical(name, shape(2 * f));
		for (const [part, logicalRow] of [
			["gate", 0],
			["up", f],
		] as const) {
			const other = `${foreign}${theirs}${part}_proj.${end}`;
			builder.addForeign(other, shape(f));
			builder.rows({ logical: name, foreign: other, width, rows: f, logicalRow });
		}
	};
	const second = (end: string, shape: readonly number[]) =>
		builder.same(`${logical}${mine}linear_fc2.${end}${number}`, `${foreign}${theirs}down_proj.${end}`, shape);
	first("weight", c.hiddenSize);
	second("weight", [c.hiddenSize, f]);
	if (!c.addBiasLinear) return;
	first("bias", 1);
	second("bias", [c.hiddenSize]);
}
