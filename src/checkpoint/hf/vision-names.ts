/**
 * Names and shapes of a vision tower's and a projector's tensors: Megatron's logical ones and those of Hugging Face folders
 * (docs/spec/vision.md §1.2, §1.3, §1.9, §3; docs/spec/checkpoint.md §4.4). A pure plan; nothing is read.
 */

import { UserError } from "../../system/errors.ts";
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
	/** Rows of the table of positions. */
	readonly positions: number;
}

/** Tower tensors outside the blocks, in the order of `outsideNames`. */
const outside = ["class_token", "position_embeddings", "embedder.weight"] as const;

interface Style {
	readonly outsideNames: readonly [classToken: string, positions: string, embedder: string];
	/** In front of a block's number. */
	readonly blocks: string;
	/** Query, key and value: one name where they are stored as one tensor. */
	readonly attention: readonly [string] | readonly [string, string, string];
	readonly projection: string;
}

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
	},
	/** transformers' RadioModel in memory. */
	transformers: {
		outsideNames: transformersOutside,
		blocks: "encoder.layer.",
		attention: ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
		projection: "attention.o_proj",
	},
	/** transformers' RADIO before its attention was renamed. */
	"transformers-bert": {
		outsideNames: transformersOutside,
		blocks: "encoder.layer.",
		attention: ["attention.attention.query", "attention.attention.key", "attention.attention.value"],
		projection: "attention.output.dense",
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
	for (const [style, { outsideNames, attention }] of Object.entries(towerStyles) as [TowerStyle, Style][]) {
		const [classToken, , embedder] = outsideNames;
		const found = [...stored.keys()].find((name) => name === embedder || name.endsWith(`.${embedder}`));
		if (found === undefined) continue;
		const old = [...stored.keys()].some((name) => name.includes(`.${towerStyles["transformers-bert"].attention[0]}.`));
		if (old !== (attention[0] === towerStyles["transformers-bert"].attention[0])) continue;
		const prefix = found.slice(0, -embedder.length);
		return { prefix, style, classAxis: stored.get(prefix + classToken)?.shape.length === 3 };
	}
	return null;
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
	const { visionHiddenSize: c, visionNumLayers: layers, classTokenLen: k } = sizes;
	const names = outsideNames(spelling);
	const shapes = [
		[k, c],
		[1, sizes.positions, c],
		[c, 3 * sizes.patchDim ** 2],
	] as const;
	for (const [index, foreign] of [names.classToken, names.positions, names.embedder].entries()) {
		if (index === 0 && k === 0) continue;
		const logical = towerPrefix + outside[index]!;
		const shape = shapes[index]!;
		if (index > 0 || !spelling.classAxis) builder.same(logical, foreign, shape);
		else {
			builder.addLogical(logical, shape);
			builder.addForeign(foreign, [1, ...shape]);
			builder.link({ logical, foreign, count: 1, length: k * c });
		}
	}
	for (let layer = 0; layer < layers; layer++) addBlock(builder, sizes, spelling, layer, path);
}

function addBlock(
	builder: CorrespondenceBuilder,
	{ visionHiddenSize: c, visionFfnHiddenSize: f, visionNumAttentionHeads: heads }: TowerSizes,
	spelling: TowerSpelling,
	layer: number,
	path: string,
): void {
	const logical = `${towerPrefix}decoder.layers.${layer}.`;
	const foreign = blockPrefix(spelling, layer);
	const { attention, projection } = towerStyles[spelling.style];
	const same = (mine: string, theirs: string, shape: readonly number[]) =>
		builder.same(logical + mine, foreign + theirs, shape);
	for (const [norm, linear] of [
		["norm1", "self_attention.linear_qkv"],
		["norm2", "mlp.linear_fc1"],
	] as const) {
		for (const kind of ["weight", "bias"]) same(`${linear}.layer_norm_${kind}`, `${norm}.${kind}`, [c]);
	}
	for (const [mine, theirs, out, width] of [
		["self_attention.linear_proj", projection, c, c],
		["mlp.linear_fc1", "mlp.fc1", f, c],
		["mlp.linear_fc2", "mlp.fc2", c, f],
	] as const) {
		same(`${mine}.weight`, `${theirs}.weight`, [out, width]);
		same(`${mine}.bias`, `${theirs}.bias`, [out]);
	}
	if (c % heads !== 0) throw new UserError(`${path}: ${heads} heads do not divide a vision tower of width ${c}.`);
	for (const kind of ["weight", "bias"]) {
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

export const projectorPrefix = "modality_submodules.radio_encoder.input_projections.0.encoder.";

/** The projector of published models: an RMS norm, two projections. */
const logical = ["linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"] as const;

/** Their names in folders, by style. */
export const projectorStyles = {
	/** Published models; mlp1.2 is the activation. */
	published: ["mlp1.0.weight", "mlp1.1.weight", "mlp1.3.weight"],
	/** transformers in memory. */
	transformers: [
		"multi_modal_projector.layer_norm.weight",
		"multi_modal_projector.linear_1.weight",
		"multi_modal_projector.linear_2.weight",
	],
	/** Megatron's and this program's own, for a projector in a file of its own. */
	logical: logical.map((name) => projectorPrefix + name) as unknown as readonly [string, string, string],
} as const satisfies Record<string, readonly [norm: string, first: string, second: string]>;

export type ProjectorStyle = keyof typeof projectorStyles;

/** The one projection of an affine projector, which published models do not have. */
export const affineName = `${projectorPrefix}weight`;

/** The projector of a model or a file, under the program's keys. */
export interface ProjectorSizes {
	readonly visionProjectionType: "affine" | "mlp";
	readonly visionProjectionNorm: boolean;
	/** Width of the rows it reads. */
	readonly input: number;
	/** mlp: its hidden width. */
	readonly visionProjectionFfnHiddenSize: number;
	/** Width of the rows it gives. */
	readonly output: number;
}

/** The spelling of the projector's names among these tensors; null: they have no projector. */
export function detectProjector(stored: Shapes): ProjectorStyle | null {
	if (stored.has(affineName)) return "logical";
	const styles = Object.entries(projectorStyles) as [ProjectorStyle, readonly string[]][];
	return styles.find(([, names]) => names.some((name) => stored.has(name)))?.[0] ?? null;
}

/** Links every tensor of a projector. */
export function addProjector(builder: CorrespondenceBuilder, sizes: ProjectorSizes, style: ProjectorStyle): void {
	const { input, output, visionProjectionFfnHiddenSize: hidden } = sizes;
	if (sizes.visionProjectionType === "affine") {
		builder.same(affineName, affineName, [output, input]);
		return;
	}
	const shapes = [[input], [hidden, input], [output, hidden]] as const;
	for (const [index, shape] of shapes.entries()) {
		if (index === 0 && !sizes.visionProjectionNorm) continue;
		builder.same(projectorPrefix + logical[index]!, projectorStyles[style][index]!, shape);
	}
}
