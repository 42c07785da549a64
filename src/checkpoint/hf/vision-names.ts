/**
 * Names and shapes of a vision tower's and a projector's tensors: Megatron's logical ones and those of Hugging Face folders
 * (docs/spec/vision.md §1.2, §1.3, §1.9, §3; docs/spec/checkpoint.md §4.4). A pure plan; nothing is read.
 */

import { UserError } from "../../system/errors.ts";
import { elementCount } from "../dtype.ts";
import type { CorrespondenceBuilder } from "../mapping.ts";

export const towerPrefix = "modality_submodules.radio_encoder.encoders.radio_encoder.radio_model.";

/** Sizes of a tower, under the program's keys. */
export interface TowerSizes {
	readonly visionNumLayers: number;
	readonly visionHiddenSize: number;
	readonly visionNumAttentionHeads: number;
	readonly visionFfnHiddenSize: number;
	readonly classTokenLen: number;
	readonly patchDim: number;
	/** Rows of the table of positions; 0: there is no table. */
	readonly positions: number;
	/** Absent: LayerNorm. */
	readonly visionNormalization?: "LayerNorm" | "RMSNorm";
	/** Absent: one that is not gated. */
	readonly visionActivation?: "gelu" | "gelu-tanh" | "swiglu";
	/** Whether it has tensors that RADIO lacks; absent: it has not. */
	readonly visionPatchBias?: boolean;
	readonly visionClassTokenPositions?: boolean;
	readonly visionFinalLayernorm?: boolean;
	/** Whether queries, keys and values have biases; absent: they have. */
	readonly visionAddQkvBias?: boolean;
	/** Whether the other projections have biases; absent: they have. */
	readonly visionAddBiasLinear?: boolean;
	/** Whether a norm follows the embedding of patches, before their positions; absent: no norm does. */
	readonly visionPatchNorm?: boolean;
	/** Whether queries and keys have norms; absent: they have none. */
	readonly visionQkNorm?: boolean;
	/** Frames of a patch; absent: one. */
	readonly visionTemporalPatchSize?: number;
	/** Absent or null: none. */
	readonly visionLayerScale?: number | null;
}

interface Style {
	readonly outsideNames: readonly [classToken: string, positions: string, embedder: string];
	/** In front of a block's number. */
	readonly blocks: string;
	/** Query, key and value: one name where they are stored as one tensor. */
	readonly attention: readonly [string] | readonly [string, string, string];
	readonly projection: string;
	readonly norms: readonly [string, string];
	/** The projections in order: of a gated MLP gate, up and down. */
	readonly mlp: readonly [string, string] | readonly [string, string, string];
	/** Factors of the columns that each half of a block adds, and the norm behind the blocks; absent: no place for them. */
	readonly scales?: readonly [string, string];
	readonly finalNorm?: string;
	/** The norm of embedded patches; absent: no place for it. */
	readonly patchNorm?: string;
	/** The norms of queries and keys; absent: no place for them. */
	readonly qkNorms?: readonly [string, string];
	/** Axes of the table of positions before its rows. */
	readonly tableAxes: readonly [1] | readonly [];
	/** Axes of a patch in the embedder's weight, of patches of side p and of so many frames. */
	readonly patchAxes: (p: number, frames: number) => readonly number[];
	/** Whether a patch's values are ordered by pixel, then channel; absent: by channel, then pixel. */
	readonly channelsLast?: true;
}

/** The halves of a block as timm has them. */
const timm = { norms: ["norm1", "norm2"], mlp: ["mlp.fc1", "mlp.fc2"] } as const;
/** RADIO embeds patches that are rows of values, others convolve. */
const rowPatches = { tableAxes: [1], patchAxes: (p: number) => [3 * p * p] } as const;
const convolution = (p: number) => [3, p, p];
const convolution3d = (p: number, frames: number) => [3, frames, p, p];
/** Qwen's and GLM's towers, whose embedder is `kernel`. */
const kernel = "patch_embed.proj.weight";
const visual = {
	blocks: "blocks.",
	attention: ["attn.qkv"],
	projection: "attn.proj",
	norms: timm.norms,
	tableAxes: [],
	patchAxes: convolution3d,
} as const;
const gated = { mlp: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] } as const;

const siglip = {
	outsideNames: ["", "embeddings.position_embedding.weight", "embeddings.patch_embedding.weight"],
	blocks: "encoder.layers.",
	attention: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
	projection: "self_attn.out_proj",
	norms: ["layer_norm1", "layer_norm2"],
	mlp: timm.mlp,
	finalNorm: "post_layernorm",
	tableAxes: [],
	patchAxes: convolution,
} as const satisfies Style;

const transformersOutside = [
	"embeddings.cls_register_token",
	"embeddings.position_embedding",
	"embeddings.patch_projection.weight",
] as const;

/** Their names in folders, by style. */
const towerStyles = {
	/** NVlabs' RADIO, published vision-language models, and what transformers writes. */
	published: {
		outsideNames: ["patch_generator.cls_token.token", "patch_generator.pos_embed", "patch_generator.embedder.weight"],
		blocks: "blocks.",
		attention: ["attn.qkv"],
		projection: "attn.proj",
		...{ ...timm, ...rowPatches },
	},
	/** transformers' RadioModel in memory. */
	transformers: {
		outsideNames: transformersOutside,
		blocks: "encoder.layer.",
		attention: ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
		projection: "attention.o_proj",
		...{ ...timm, ...rowPatches },
	},
	/** transformers' RADIO before its attention was renamed. */
	"transformers-bert": {
		outsideNames: transformersOutside,
		blocks: "encoder.layer.",
		attention: ["attention.attention.query", "attention.attention.key", "attention.attention.value"],
		projection: "attention.output.dense",
		...{ ...timm, ...rowPatches },
	},
	siglip,
	/** SigLIP 2 of native sizes embeds rows of values, whose channels are neighbours. */
	siglip2: { ...siglip, patchAxes: rowPatches.patchAxes, channelsLast: true },
	internvit: {
		outsideNames: [
			"embeddings.cls_token",
			"embeddings.position_embeddings",
			"embeddings.patch_embeddings.projection.weight",
		],
		blocks: "encoder.layer.",
		attention: ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
		projection: "attention.projection_layer",
		norms: ["layernorm_before", "layernorm_after"],
		mlp: timm.mlp,
		scales: ["lambda_1", "lambda_2"],
		qkNorms: ["attention.q_norm", "attention.k_norm"],
		finalNorm: "layernorm",
		tableAxes: [1],
		patchAxes: convolution,
	},
	/** Qwen2.5-VL, which has no table of positions. */
	qwen25: { ...visual, ...gated, outsideNames: ["", "", kernel], finalNorm: "merger.ln_q" },
	/** GLM-4.5V. */
	glm: {
		...{ ...visual, ...gated, patchNorm: "post_conv_layernorm", finalNorm: "post_layernorm" },
		outsideNames: ["", "embeddings.position_embedding.weight", kernel],
	},
	/** Qwen3-VL and Qwen3.5: the norm of the projector is of single patches, as one behind the layers. */
	qwen: {
		...visual,
		outsideNames: ["", "pos_embed.weight", kernel],
		mlp: ["mlp.linear_fc1", "mlp.linear_fc2"],
		finalNorm: "merger.norm",
	},
} as const satisfies Record<string, Style>;

type TowerStyle = keyof typeof towerStyles;

/** A folder's names of a tower's tensors. */
export interface TowerSpelling {
	/** In front of every name. */
	readonly prefix: string;
	readonly style: TowerStyle;
	/** The class tokens have a leading axis of one. */
	readonly classAxis: boolean;
}

/** In a published vision-language model. */
export const publishedTower: TowerSpelling = {
	prefix: "vision_model.radio_model.model.",
	style: "published",
	classAxis: false,
};

type Shapes = ReadonlyMap<string, { readonly shape: readonly number[] }>;

/** The spelling of the tower among a folder's tensors, or null if there is none. */
export function detectTower(stored: Shapes): TowerSpelling | null {
	for (const [style, { outsideNames, attention, patchAxes, finalNorm }] of Object.entries(towerStyles) as [
		TowerStyle,
		Style,
	][]) {
		const [classToken, , embedder] = outsideNames;
		const found = [...stored.keys()].find((name) => name === embedder || name.endsWith(`.${embedder}`));
		if (found === undefined) continue;
		// A kernel and rows of values differ in axes; a wrong one of RADIO is named where it is read.
		if (style.startsWith("siglip") && stored.get(found)!.shape.length !== patchAxes(1, 1).length + 1) continue;
		const old = [...stored.keys()].some((name) => name.includes(`.${towerStyles["transformers-bert"].attention[0]}.`));
		if (embedder === kernel && !stored.has(`${found.slice(0, -embedder.length)}${finalNorm}.weight`)) continue;
		if (old !== (attention[0] === towerStyles["transformers-bert"].attention[0])) continue;
		const prefix = found.slice(0, -embedder.length);
		return { prefix, style, classAxis: stored.get(prefix + classToken)?.shape.length === 3 };
	}
	return null;
}

/** The norm's name behind the blocks; null: the names have none, as RADIO's. */
export function finalNormOf({ prefix, style }: TowerSpelling): string | null {
	const { finalNorm }: Style = towerStyles[style];
	return finalNorm === undefined ? null : prefix + finalNorm;
}

/** Names of a tower's tensors outside its blocks: class tokens, table of positions, embedder. */
export function outsideNames({ prefix, style }: TowerSpelling): {
	classToken: string;
	positions: string;
	embedder: string;
} {
	const [classToken, positions, embedder] = towerStyles[style].outsideNames.map((name) => prefix + name);
	return { classToken: classToken!, positions: positions!, embedder: embedder! };
}

/** In front of the names of block `index`. */
export function blockPrefix({ prefix, style }: TowerSpelling, index: number | string): string {
	return `${prefix}${towerStyles[style].blocks}${index}.`;
}

/** Links every tensor of a tower. */
export function addTower(
	builder: CorrespondenceBuilder,
	sizes: TowerSizes,
	spelling: TowerSpelling,
	path: string,
): void {
	const { visionHiddenSize: c, visionNumLayers: layers, classTokenLen: k, patchDim } = sizes;
	const { visionTemporalPatchSize: frames = 1 } = sizes;
	const { tableAxes, patchAxes, patchNorm, finalNorm, channelsLast }: Style = towerStyles[spelling.style];
	const names = outsideNames(spelling);
	const link = (logical: string, shape: readonly number[], foreign: string, other: readonly number[]) => {
		builder.addLogical(towerPrefix + logical, shape);
		builder.addForeign(foreign, other);
		builder.link({ logical: towerPrefix + logical, foreign, count: 1, length: elementCount(shape)! });
	};
	if (k > 0) link("class_token", [k, c], names.classToken, spelling.classAxis ? [1, k, c] : [k, c]);
	if (sizes.visionClassTokenPositions) addTable(builder, sizes, names.positions);
	else if (sizes.positions > 0)
		link("position_embeddings", [1, sizes.positions, c], names.positions, [...tableAxes, sizes.positions, c]);
	const pixels = frames * patchDim ** 2;
	if (!channelsLast) link("embedder.weight", [c, 3 * pixels], names.embedder, [c, ...patchAxes(patchDim, frames)]);
	else {
		const embedder = { logical: `${towerPrefix}embedder.weight`, foreign: names.embedder };
		addInterleaved(builder, embedder, { rows: c, parts: 3, length: pixels, shape: [c, 3 * pixels] });
	}
	if (sizes.visionPatchBias) builder.same(`${towerPrefix}embedder.bias`, biasOf(names.embedder), [c]);
	for (let layer = 0; layer < layers; layer++) addBlock(builder, sizes, spelling, layer, path);
	for (const [mine, theirs] of [
		["embedder_norm", sizes.visionPatchNorm && patchNorm],
		["decoder.final_layernorm", sizes.visionFinalLayernorm && finalNorm],
	] as const) {
		for (const kind of theirs ? normKinds(sizes) : []) {
			builder.same(`${towerPrefix}${mine}.${kind}`, `${spelling.prefix}${theirs}.${kind}`, [c]);
		}
	}
}

const normKinds = ({ visionNormalization: kind }: TowerSizes) => (kind === "RMSNorm" ? ["weight"] : ["weight", "bias"]);

/** The name of the bias beside a weight. */
export const biasOf = (weight: string) => weight.replace(/weight$/, "bias");

/** A matrix whose rows are parts one behind the other; of the other format, of this shape, the values of all parts are neighbours. */
export function addInterleaved(
	builder: CorrespondenceBuilder,
	names: { readonly logical: string; readonly foreign: string },
	sizes: { readonly rows: number; readonly parts: number; readonly length: number; readonly shape: readonly number[] },
): void {
	const { rows: count, parts, length, shape } = sizes;
	const stride = parts * length;
	builder.addLogical(names.logical, [count, stride]);
	builder.addForeign(names.foreign, shape);
	for (let part = 0; part < parts; part++) {
		const logicalRuns = { offset: part * length, stride };
		builder.link({ ...names, logicalRuns, foreignRuns: { offset: part, stride, step: parts }, count, length });
	}
}

/** A table whose first rows are the positions of class tokens. */
function addTable(builder: CorrespondenceBuilder, sizes: TowerSizes, foreign: string): void {
	const { visionHiddenSize: width, classTokenLen: classes, positions } = sizes;
	builder.addForeign(foreign, [1, classes + positions, width]);
	for (const [name, shape, foreignRow] of [
		["class_position_embeddings", [classes, width], 0],
		["position_embeddings", [1, positions, width], classes],
	] as const) {
		builder.addLogical(towerPrefix + name, shape);
		builder.rows({ logical: towerPrefix + name, foreign, width, rows: shape.at(-2)!, foreignRow });
	}
}

function addBlock(
	builder: CorrespondenceBuilder,
	sizes: TowerSizes,
	spelling: TowerSpelling,
	layer: number,
	path: string,
): void {
	const {
		visionHiddenSize: c,
		visionFfnHiddenSize: f,
		visionNumAttentionHeads: heads,
		visionLayerScale: scale,
		visionAddBiasLinear: biased = true,
	} = sizes;
	const logical = `${towerPrefix}decoder.layers.${layer}.`;
	const foreign = blockPrefix(spelling, layer);
	const { attention, projection, norms, mlp, scales, qkNorms } = towerStyles[spelling.style] as Style;
	const same = (mine: string, theirs: string, shape: readonly number[]) =>
		builder.same(logical + mine, foreign + theirs, shape);
	for (const [norm, linear] of [
		[norms[0], "self_attention.linear_qkv"],
		[norms[1], "mlp.linear_fc1"],
	] as const) {
		for (const kind of normKinds(sizes)) same(`${linear}.layer_norm_${kind}`, `${norm}.${kind}`, [c]);
	}
	const gated = mlp.length === 3;
	for (const [mine, theirs, out, width] of [
		["self_attention.linear_proj", projection, c, c],
		...(gated ? [] : [["mlp.linear_fc1", mlp[0], f, c] as const]),
		["mlp.linear_fc2", mlp.at(-1)!, c, f],
	] as const) {
		same(`${mine}.weight`, `${theirs}.weight`, [out, width]);
		if (biased) same(`${mine}.bias`, `${theirs}.bias`, [out]);
	}
	if (gated) {
		const halves = [mlp[0], mlp[1]].map((name) => foreign + name);
		addGated(builder, `${logical}mlp.linear_fc1`, halves, { rows: f, columns: c, biased });
	}
	if (scale != null && scales !== undefined) {
		same("self_attention.layer_scale", scales[0], [c]);
		same("mlp.layer_scale", scales[1], [c]);
	}
	for (const [at, name] of ((sizes.visionQkNorm ? qkNorms : null) ?? []).entries()) {
		same(`self_attention.${"qk"[at]}_layernorm.weight`, `${name}.weight`, [c]);
	}
	if (c % heads !== 0) throw new UserError(`${path}: ${heads} heads do not divide a vision tower of width ${c}.`);
	for (const kind of sizes.visionAddQkvBias === false ? ["weight"] : ["weight", "bias"]) {
		const fused = `${logical}self_attention.linear_qkv.${kind}`;
		const width = kind === "weight" ? c : 1;
		const shape = (rows: number) => (kind === "weight" ? [rows, c] : [rows]);
		builder.addLogical(fused, shape(3 * c));
		// Rows of linear_qkv: per head query, key, value; the other side has all queries, all keys, all values.
		for (let part = 0; part < 3; part++) {
			const name = `${foreign}${attention[part] ?? attention[0]}.${kind}`;
			const apart = attention.length === 3;
			builder.addForeign(name, shape(apart ? c : 3 * c));
			builder.rows({
				logical: fused,
				foreign: name,
				width,
				rows: c / heads,
				count: heads,
				logicalRow: (part * c) / heads,
				logicalStride: (3 * c) / heads,
				foreignRow: apart ? 0 : part * c,
			});
		}
	}
}

/** The first projection of a gated MLP: the gate's rows, then the linear ones. */
export function addGated(
	builder: CorrespondenceBuilder,
	logical: string,
	foreign: readonly string[],
	{ rows, columns, biased }: { readonly rows: number; readonly columns: number; readonly biased: boolean },
): void {
	const weight = ["weight", columns] as const;
	for (const [kind, width] of biased ? [weight, ["bias", 1] as const] : [weight]) {
		const shape = (count: number) => (kind === "weight" ? [count, columns] : [count]);
		builder.addLogical(`${logical}.${kind}`, shape(foreign.length * rows));
		for (const [half, name] of foreign.entries()) {
			builder.addForeign(`${name}.${kind}`, shape(rows));
			builder.rows({ logical: `${logical}.${kind}`, foreign: `${name}.${kind}`, width, rows, logicalRow: half * rows });
		}
	}
}
