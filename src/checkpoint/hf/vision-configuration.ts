/**
 * A vision tower and a projector in the program's keys. Sizes are those of the tensors; the sizes in config.json have
 * to agree. config.json alone tells the number of heads and the activation. Read from transformers' RadioConfig and from the
 * config.json of RADIO's own code, which keeps timm's model name and its arguments in `args`.
 */

import type { TrainingConfiguration } from "../../config/schema.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { refusalAt } from "./families/family.ts";
import {
	affineName,
	countDeepProjectors,
	detectProjector,
	hasNewline,
	type ProjectorSizes,
	type ProjectorStyle,
	projectorStyles,
	stemNames,
} from "./projector-names.ts";
import {
	biasOf,
	blockPrefix,
	finalNormOf,
	outsideNames,
	type TowerSizes,
	type TowerSpelling,
	towerPrefix,
} from "./vision-names.ts";
import { isTowerType, readTower, tappedTower, towerTypes } from "./vision-towers.ts";

/** The keys that decide a tower's function. */
export interface TowerConfiguration extends Omit<TowerSizes, "positions" | "visionActivation" | "visionNormalization"> {
	readonly visionKvChannels: number;
	/** Pixels that the square table of positions covers. */
	readonly visionMaxImgH: number;
	readonly visionMaxImgW: number;
	readonly visionActivation: "gelu" | "gelu-tanh" | "swiglu";
	readonly visionNormalization: TrainingConfiguration["visionNormalization"];
	readonly visionWindowSize: number | null;
	readonly fullattBlockIndexes: readonly number[] | null;
	readonly visionPositionMode: TrainingConfiguration["visionPositionMode"];
	readonly visionNormEpsilon: number;
	readonly visionFinalLayernorm: boolean;
	readonly visionPatchBias: boolean;
	readonly visionAddQkvBias: boolean;
	readonly visionAddBiasLinear: boolean;
	readonly visionPatchNorm: boolean;
	readonly visionQkNorm: boolean;
	readonly visionClassTokenPositions: boolean;
	readonly visionLayerScale: number | null;
	readonly visionTemporalPatchSize: number;
	readonly visionRotaryBase: number | null;
	readonly deepstackVisualIndexes: readonly number[] | null;
	readonly visionFeatureLayers: readonly number[] | null;
}

/** RADIO's values of the options that other towers have, but for those that its tensors tell. */
export const radioOptions = {
	...({ visionPositionMode: "cpe", visionNormalization: "LayerNorm" } as const),
	...{ visionNormEpsilon: 1e-6, visionLayerScale: null, visionQkNorm: false, visionPatchNorm: false },
	...{ visionAddQkvBias: true, visionAddBiasLinear: true, visionWindowSize: null, fullattBlockIndexes: null },
	...{ visionTemporalPatchSize: 1, visionRotaryBase: null, deepstackVisualIndexes: null, visionFeatureLayers: null },
};

type Json = Readonly<Record<string, unknown>>;
type Shapes = ReadonlyMap<string, { readonly shape: readonly number[] }>;

/** Heads of the usual widths. */
const headsOfWidth: Readonly<Record<number, number>> = { 384: 6, 768: 12, 1024: 16, 1280: 16 };

/** Names of activations in config.json. */
const activations: Readonly<Record<string, "gelu" | "gelu-tanh">> = {
	gelu: "gelu",
	gelu_pytorch_tanh: "gelu-tanh",
	gelu_new: "gelu-tanh",
};

/** Fields with the only value this program's tower has; an absent one has it. */
const fixed: Json = {
	use_swiglu_ffn: false,
	qkv_bias: true,
	qk_normalization: false,
	norm_type: "layer_norm",
	layer_norm_eps: 1e-6,
	num_channels: 3,
};

function isObject(value: unknown): value is Json {
	return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The part of a config.json that describes the tower: of a model with one, or of the tower alone. */
export function towerConfig(json: Json): Json {
	if (isObject(json.vision_config)) return json.vision_config;
	if (isTowerType(json.model_type)) return json;
	return /radio/i.test(String(json.model_type ?? json.architectures)) || isObject(json.args) ? json : {};
}

/** `flag`: heads that the user names. `path` is config.json's, for errors; `folder` the tensors'. */
export function towerConfiguration(
	json: Json,
	stored: Shapes,
	spelling: TowerSpelling,
	{ flag, path, folder }: { readonly flag: number | null; readonly path: string; readonly folder: string },
): TowerConfiguration & TowerSizes {
	const section = towerConfig(json);
	const values: Json = { ...section, ...(isObject(section.args) ? section.args : {}) };
	const bad = refusalAt(path);
	if (isTowerType(section.model_type)) {
		const tower = readTower(section, activations, bad);
		const { visionNumLayers: layers } = tower;
		if (layers > stored.size) bad(`num_hidden_layers is ${layers}, and there are ${counted(stored.size, "tensor")}`);
		return tappedTower(tower, json, bad);
	}
	if (finalNormOf(spelling) !== null) {
		const known = ["radio", ...towerTypes].map((type) => JSON.stringify(type)).join(", ");
		bad(`model_type of the vision tower is ${JSON.stringify(section.model_type ?? null)}; ${known} can be read`);
	}
	for (const [name, only] of Object.entries(fixed)) {
		const value = values[name];
		if (value !== undefined && value !== null && value !== only) {
			bad(`${name} is ${JSON.stringify(value)}, this program's vision tower has only ${JSON.stringify(only)}`);
		}
	}
	const read: TowerReading = {
		values,
		spelling,
		sizeOf: axisSizes(stored, folder),
		agree: agreement(values, bad),
		bad,
	};
	const { width, patch } = embedderSizes(read);
	const { positions, pixels } = positionSizes(read, patch, section.max_resolution);
	const classTokens = classTokensOf(read, stored);
	const layers = layersOf(values, stored, spelling, bad);
	const ffn = ffnSize(read, layers, width);
	const heads = headsOf(values, width, flag, path);
	const act = values.hidden_act ?? "gelu";
	if (typeof act !== "string" || !Object.hasOwn(activations, act)) {
		bad(`hidden_act is ${JSON.stringify(act)}, this program's vision tower has ${Object.keys(activations).join(", ")}`);
	}
	return {
		visionNumLayers: layers,
		visionHiddenSize: width,
		visionNumAttentionHeads: heads,
		visionKvChannels: width / heads,
		visionFfnHiddenSize: ffn,
		visionMaxImgH: pixels,
		visionMaxImgW: pixels,
		visionActivation: activations[act as string]!,
		...radioOptions,
		...{ visionFinalLayernorm: false, visionPatchBias: false, visionClassTokenPositions: false },
		classTokenLen: classTokens,
		patchDim: patch,
		positions,
	};
}

/** Whether a folder's tensor belongs to layers, or the norm, behind the one that a vision-language model reads. */
export function behindTap(json: Json, spelling: TowerSpelling | null, path: string): (name: string) => boolean {
	const section = towerConfig(json);
	if (spelling === null || !isTowerType(section.model_type)) return () => false;
	const whole = readTower(section, activations, refusalAt(path));
	const read = tappedTower(whole, json, refusalAt(path));
	const unread = Array.from({ length: whole.visionNumLayers - read.visionNumLayers }, (_, index) =>
		blockPrefix(spelling, read.visionNumLayers + index),
	);
	if (whole.visionFinalLayernorm && !read.visionFinalLayernorm) unread.push(`${finalNormOf(spelling)}.`);
	return (name) => unread.some((prefix) => name.startsWith(prefix));
}

/** The shared parts of the readers of single sizes. */
interface TowerReading {
	readonly values: Json;
	readonly spelling: TowerSpelling;
	/** Size of a stored tensor of `axes` axes along `axis`. Throws a UserError if the tensor is missing or has other axes. */
	readonly sizeOf: (name: string, axes: number, axis: number) => number;
	/** Returns `found`, the size of `tensor`. Throws a UserError if config.json has another value for `key`. */
	readonly agree: (key: string, tensor: string, found: number, said?: unknown) => number;
	readonly bad: (sentence: string) => never;
}

function axisSizes(stored: Shapes, folder: string): TowerReading["sizeOf"] {
	return (name, axes, axis) => {
		const shape = stored.get(name)?.shape;
		if (shape === undefined) throw new UserError(`${folder} has no tensor ${name}.`);
		if (shape.length === axes) return shape[axis]!;
		throw new UserError(`${folder}: ${name} has [${shape.join(", ")}], expected ${axes} axes.`);
	};
}

function agreement(values: Json, bad: TowerReading["bad"]): TowerReading["agree"] {
	return (key, tensor, found, said = values[key]) => {
		if (said !== undefined && said !== null && said !== found) {
			bad(`${key} is ${JSON.stringify(said)}, but tensor ${tensor} says ${found}`);
		}
		return found;
	};
}

function embedderSizes({ values, spelling, sizeOf, agree, bad }: TowerReading): {
	readonly width: number;
	readonly patch: number;
} {
	const { embedder } = outsideNames(spelling);
	const width = sizeOf(embedder, 2, 0);
	agree("hidden_size", embedder, width);
	const patch = Math.sqrt(sizeOf(embedder, 2, 1) / 3);
	if (!Number.isInteger(patch)) bad(`tensor ${embedder} holds no square patches of three colours`);
	agree("patch_size", embedder, patch, [values.patch_size].flat()[0]);
	return { width, patch };
}

/** Entries of the position table, and the side in pixels of the image that it covers. */
function positionSizes(
	{ values, spelling, sizeOf, bad }: TowerReading,
	patch: number,
	maxResolution: unknown,
): { readonly positions: number; readonly pixels: number } {
	const { positions: name } = outsideNames(spelling);
	const positions = sizeOf(name, 3, 1);
	const side = Math.sqrt(positions);
	if (!Number.isInteger(side)) bad(`tensor ${name} is not a square table of ${positions} positions`);
	const said = [values.max_img_size, values.cpe_max_size, maxResolution].find((n) => typeof n === "number");
	const pixels = (said as number | undefined) ?? side * patch;
	if (Math.floor(pixels / patch) !== side) {
		bad(`images of ${pixels} pixels have ${Math.floor(pixels / patch)} patches a side, but tensor ${name} has ${side}`);
	}
	return { positions, pixels };
}

/** Number of class tokens and registers, which are stored as one tensor; 0 without the tensor. */
function classTokensOf({ values, spelling, sizeOf, agree }: TowerReading, stored: Shapes): number {
	const { classToken } = outsideNames(spelling);
	const count = stored.has(classToken) ? sizeOf(classToken, spelling.classAxis ? 3 : 2, spelling.classAxis ? 1 : 0) : 0;
	const { num_cls_tokens: tokens, num_registers: registers } = values;
	if (typeof tokens !== "number" || typeof registers !== "number") return count;
	return agree("num_cls_tokens + num_registers", classToken, count, tokens + registers);
}

/** Hidden width of the blocks' MLPs; 4 times the width for a tower without blocks. */
function ffnSize({ values, spelling, sizeOf, agree }: TowerReading, layers: number, width: number): number {
	const name = `${blockPrefix(spelling, 0)}mlp.fc1.weight`;
	const ffn = layers === 0 ? 4 * width : sizeOf(name, 2, 0);
	if (typeof values.mlp_ratio !== "number") return ffn;
	return agree("hidden_size × mlp_ratio", name, ffn, Math.trunc(width * values.mlp_ratio));
}

/** Number of blocks: by config.json, else by their tensors. */
function layersOf(values: Json, stored: Shapes, spelling: TowerSpelling, bad: (sentence: string) => never): number {
	const start = blockPrefix(spelling, "").slice(0, -1);
	const numbers = new Set<number>();
	for (const name of stored.keys()) {
		const number = name.startsWith(start) ? /^\d{1,9}(?=\.)/.exec(name.slice(start.length)) : null;
		if (number) numbers.add(Number(number[0]));
	}
	const said = values.num_hidden_layers;
	if (said === undefined || said === null) return numbers.size;
	if (!Number.isSafeInteger(said) || (said as number) < 0 || (said as number) > stored.size) {
		bad(`num_hidden_layers is ${JSON.stringify(said)}, and there are ${counted(stored.size, "tensor")}`);
	}
	return said as number;
}

function headsOf(values: Json, width: number, flag: number | null, path: string): number {
	const said = Number.isSafeInteger(values.num_attention_heads) ? (values.num_attention_heads as number) : null;
	if (flag !== null && said !== null && flag !== said) {
		throw new UserError(
			`${path} says ${counted(said, "head")} of the vision tower, --vision-num-attention-heads ${flag}.`,
		);
	}
	const heads = flag ?? said ?? headsOfWidth[width] ?? null;
	if (heads === null) {
		throw new UserError(
			`${path}: a vision tower of width ${width} has an unknown number of heads, since config.json has no num_attention_heads; name it with --vision-num-attention-heads.`,
		);
	}
	if (heads > 0 && width % heads === 0) return heads;
	throw new UserError(`${path}: ${heads} heads do not divide a vision tower of width ${width}.`);
}

/** The sizes of a tower from its logical tensors; null: there is none. `described` may know its heads. */
export function towerOfLogical(
	{ tensors, path }: { readonly tensors: Shapes; readonly path: string },
	described: Json,
	target: string,
): TowerSizes | null {
	const shapeOf = (name: string) => tensors.get(towerPrefix + name)?.shape;
	const embedder = shapeOf("embedder.weight");
	if (embedder === undefined) return null;
	const width = embedder[0]!;
	const layer = new RegExp(`^${RegExp.escape(towerPrefix)}decoder\\.layers\\.(\\d{1,9})\\.`);
	const layers = new Set([...tensors.keys()].flatMap((name) => layer.exec(name)?.[1] ?? []));
	const has = (name: string) => shapeOf(name) !== undefined;
	const frames = Number(described.visionTemporalPatchSize ?? 1);
	const named = described.visionNumAttentionHeads;
	const untabled = described.visionPositionMode === "none";
	const positions = untabled ? 0 : shapeOf("position_embeddings")?.[1];
	const gated = described.visionActivation === "swiglu";
	const first = shapeOf("decoder.layers.0.mlp.linear_fc1.weight")?.[0] ?? (gated ? 8 : 4) * width;
	if (positions === undefined) throw new UserError(`${path} has no tensor ${towerPrefix}position_embeddings.`);
	return {
		visionNumLayers: layers.size,
		visionHiddenSize: width,
		visionNumAttentionHeads: headsOf({}, width, typeof named === "number" ? named : null, target),
		visionFfnHiddenSize: gated ? first / 2 : first,
		...(gated && ({ visionActivation: "swiglu" } as const)),
		...(described.visionNormalization === "RMSNorm" && ({ visionNormalization: "RMSNorm" } as const)),
		classTokenLen: shapeOf("class_token")?.[0] ?? 0,
		patchDim: Math.sqrt(embedder[1]! / 3 / frames),
		positions,
		visionTemporalPatchSize: frames,
		visionPatchBias: has("embedder.bias"),
		visionAddQkvBias: layers.size === 0 || has("decoder.layers.0.self_attention.linear_qkv.bias"),
		visionAddBiasLinear: layers.size === 0 || has("decoder.layers.0.mlp.linear_fc2.bias"),
		visionPatchNorm: has("embedder_norm.weight"),
		visionQkNorm: has("decoder.layers.0.self_attention.q_layernorm.weight"),
		visionClassTokenPositions: has("class_position_embeddings"),
		visionFinalLayernorm: has("decoder.final_layernorm.weight"),
		visionLayerScale: has("decoder.layers.0.mlp.layer_scale") ? 1 : null,
	};
}

/** The sizes of a projector, from its tensors; `json`: config.json, which names its activation. */
export function projectorSizes(stored: Shapes, style: ProjectorStyle, path: string, json: Json = {}): ProjectorSizes {
	const matrix = (name: string): readonly number[] => {
		const shape = stored.get(name)?.shape;
		if (shape === undefined) throw new UserError(`${path} has no tensor ${name}.`);
		if (shape.length === 2) return shape;
		throw new UserError(`${path}: ${name} has [${shape.join(", ")}], expected 2 axes.`);
	};
	if (style === "logical" && stored.has(affineName)) {
		const [output, input] = matrix(affineName) as [number, number];
		const none = { visionProjectionNorm: false, visionProjectionFfnHiddenSize: 0 };
		return { visionProjectionType: "affine", input, output, ...none };
	}
	const [norm, first, second] = projectorStyles[style];
	const [rows, columns] = matrix(first) as [number, number];
	const [output, hidden] = matrix(second) as [number, number];
	const [entry] = stemNames(style);
	const entered = stored.get(entry)?.shape.slice(1);
	const gated = style === "glm" || rows === 2 * hidden;
	return {
		visionProjectionType: "mlp",
		visionProjectionNorm: stored.has(norm),
		visionProjectionNormalization: stored.has(biasOf(norm)) ? "LayerNorm" : "RMSNorm",
		visionProjectionActivation: gated ? "swiglu" : projectorActivation(json, path),
		visionProjectionStem: entered !== undefined,
		visionProjectionBias: stored.has(biasOf(first)),
		deepstack: countDeepProjectors(stored),
		visionImageNewline: hasNewline(stored),
		visionProjectionFfnHiddenSize: hidden,
		input: entered?.reduce((all, size) => all * size, 1) ?? columns,
		output,
	};
}

/** Nemotron's models have no field for it. */
function projectorActivation({ model_type: type, projector_hidden_act: act }: Json, path: string) {
	const said = act ?? (/^(llava|internvl|qwen)/.test(String(type)) ? "gelu" : "relu2");
	const names = { gelu: "gelu", relu2: "squared-relu" } as const;
	if (typeof said === "string" && Object.hasOwn(names, said)) return names[said as keyof typeof names];
	throw new UserError(
		`${path}: projector_hidden_act is ${JSON.stringify(said)}, a projector has ${Object.keys(names).join(" or ")}.`,
	);
}

/** Whether a projector of `input` columns reads joined patches of a tower. */
export function readsJoinedPatches(
	input: number,
	{ visionHiddenSize, visionFeatureLayers }: Pick<TowerConfiguration, "visionHiddenSize" | "visionFeatureLayers">,
	projector: string,
	tower: string,
): boolean {
	const width = visionHiddenSize * (1 + (visionFeatureLayers?.length ?? 0));
	if (input === 4 * width) return true;
	if (input === width) return false;
	throw new UserError(
		`The projector of ${projector} reads rows of ${input}, but the tower of ${tower} gives rows of ${width}, or of ${4 * width} with --pixel-shuffle.`,
	);
}

/** Tower and projector of a model under logical names, as PEFT's names of adapters need them; null: it has no tower. */
export function visionOfLogical(
	weights: { readonly tensors: Shapes; readonly path: string },
	described: Json,
	target: string,
): { readonly tower: TowerSizes; readonly projector: ProjectorSizes | null } | null {
	const tower = towerOfLogical(weights, described, target);
	if (tower === null) return null;
	const style = detectProjector(weights.tensors);
	const projector = style === null ? null : projectorSizes(weights.tensors, style, weights.path);
	return { tower, projector: projector?.visionProjectionType === "mlp" ? projector : null };
}
