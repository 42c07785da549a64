/** Vision towers that transformers' config.json describes wholly, by its model_type: SigLIP, InternViT, Qwen's, GLM's. */
import { type Json, type Refuse, whole } from "./families/family.ts";
import type { TowerConfiguration } from "./vision-configuration.ts";
import type { TowerSizes } from "./vision-names.ts";

type Tower = TowerConfiguration & TowerSizes;

/** A tower's own fields, and how it is read. */
interface TowerType {
	/** transformers' sizes of a field that config.json leaves out. */
	readonly sizes: Readonly<Record<string, number>>;
	/** Fields with the only value that this program's tower has, which an absent one has. */
	readonly only: Json;
	readonly activation: string;
	/** The tower's own names of fields, by those of others; absent: it has the same. */
	readonly names?: Readonly<Record<string, string>>;
	/** Side of the square table of positions, in patches. */
	readonly side: (values: Json, patch: number, bad: Refuse) => number;
	readonly read: (values: Json, bad: Refuse) => Pick<Tower, (typeof own)[number]> & Partial<Tower>;
}

const own = [
	"visionFinalLayernorm",
	"visionPositionMode",
	"classTokenLen",
	"visionClassTokenPositions",
	"visionLayerScale",
	"visionTemporalPatchSize",
	"visionRotaryBase",
	"deepstackVisualIndexes",
] as const;

const siglipSizes = {
	...{ hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12 },
	...{ patch_size: 16, image_size: 224 },
};
const pictures = { visionTemporalPatchSize: 1, visionRotaryBase: null, deepstackVisualIndexes: null } as const;
const noClassToken = { classTokenLen: 0, visionClassTokenPositions: false, visionLayerScale: null } as const;

/** Names of Qwen's and GLM's towers. */
const depths = { num_hidden_layers: "depth", num_attention_heads: "num_heads", num_channels: "in_channels" } as const;
/** Their frames of a patch and rotary embeddings. */
const turned = (values: Json, bad: Refuse) => ({
	visionTemporalPatchSize: whole(values, "temporal_patch_size", 2, bad),
	visionRotaryBase: Number((values.rope_parameters as Json | undefined)?.rope_theta ?? 10000),
});

/** Qwen3-VL's; `taps`: of DeepStack where config.json has none. */
const qwen = (taps: readonly number[]): TowerType => ({
	sizes: {
		...{ hidden_size: 1152, intermediate_size: 4304, num_hidden_layers: 27, num_attention_heads: 16 },
		...{ patch_size: 16, num_patches: 2304 },
	},
	names: { ...depths, num_patches: "num_position_embeddings" },
	only: { num_channels: 3, spatial_merge_size: 2 },
	activation: "gelu_pytorch_tanh",
	side: (values, _, bad) => sideOf(whole(values, "num_patches", 2304, bad), bad),
	read: (values, bad) => ({
		...noClassToken,
		...{ visionFinalLayernorm: true, visionPositionMode: "aligned" },
		...turned(values, bad),
		deepstackVisualIndexes: layersOf("deepstack_visual_indexes", values.deepstack_visual_indexes ?? taps, bad),
	}),
});

/** Layers that a field lists; null: none. */
function layersOf(name: string, layers: unknown, bad: Refuse): readonly number[] | null {
	const ascends = (layer: unknown, at: number, all: unknown[]) =>
		Number.isSafeInteger(layer) && (layer as number) > ((all[at - 1] as number | undefined) ?? -1);
	if (Array.isArray(layers) && layers.every(ascends)) return layers.length === 0 ? null : (layers as number[]);
	return bad(`${name} is ${JSON.stringify(layers)}, expected layers in ascending order`);
}

/** Qwen2.5-VL's: no table of positions, windows, RMSNorm, gated MLP. */
const qwen25: TowerType = {
	sizes: {
		...{ hidden_size: 3584, intermediate_size: 3420, num_hidden_layers: 32, num_attention_heads: 16, patch_size: 14 },
	},
	names: depths,
	only: { num_channels: 3, spatial_merge_size: 2 },
	activation: "silu",
	side: () => 0,
	read: (values, bad) => ({
		...noClassToken,
		...({ visionFinalLayernorm: true, visionPositionMode: "none", visionNormalization: "RMSNorm" } as const),
		...{ visionPatchBias: false, deepstackVisualIndexes: null },
		...turned(values, bad),
		visionWindowSize: whole(values, "window_size", 112, bad),
		fullattBlockIndexes: layersOf("fullatt_block_indexes", values.fullatt_block_indexes ?? [7, 15, 23, 31], bad),
	}),
};

/** GLM-4.5V's, whose MLPs are as wide as the language model. */
const glm: TowerType = {
	sizes: {
		...{ hidden_size: 1536, intermediate_size: 4096, num_hidden_layers: 24, num_attention_heads: 12 },
		...{ patch_size: 14, image_size: 336 },
	},
	names: { ...depths, intermediate_size: "out_hidden_size", layer_norm_eps: "rms_norm_eps" },
	only: { num_channels: 3, spatial_merge_size: 2, attention_dropout: 0 },
	activation: "silu",
	side: sideOfImage,
	read: (values, bad) => ({
		...noClassToken,
		...({ visionFinalLayernorm: true, visionPositionMode: "bicubic", visionNormalization: "RMSNorm" } as const),
		...{ visionPatchNorm: true, visionAddQkvBias: values.attention_bias === true, visionAddBiasLinear: false },
		visionNormEpsilon: Number(values.layer_norm_eps ?? 1e-5),
		deepstackVisualIndexes: null,
		...turned(values, bad),
	}),
};

const [qwen3, qwen35] = [qwen([8, 16, 24]), qwen([])];

const types: Readonly<Record<string, TowerType>> = {
	siglip_vision_model: {
		sizes: siglipSizes,
		only: { num_channels: 3, attention_dropout: 0 },
		activation: "gelu_pytorch_tanh",
		side: sideOfImage,
		read: () => ({ ...pictures, ...noClassToken, visionFinalLayernorm: true, visionPositionMode: "direct" }),
	},
	siglip2_vision_model: {
		sizes: { ...siglipSizes, num_patches: 256 },
		only: { num_channels: 3, attention_dropout: 0 },
		activation: "gelu_pytorch_tanh",
		side: (values, _, bad) => sideOf(whole(values, "num_patches", 256, bad), bad),
		read: () => ({ ...pictures, ...noClassToken, visionFinalLayernorm: true, visionPositionMode: "antialias" }),
	},
	internvl_vision: {
		sizes: {
			...{ hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 24, num_attention_heads: 16 },
			...{ patch_size: 14, image_size: 448 },
		},
		only: {
			...{ num_channels: 3, attention_dropout: 0, hidden_dropout_prob: 0, projection_dropout: 0 },
			...{ use_mask_token: false, use_absolute_position_embeddings: true },
		},
		activation: "gelu",
		side: sideOfImage,
		read: ({ layer_scale_init_value: scale = 0.1, use_mean_pooling: pooled = true, ...values }, bad) => {
			const { norm_type: norm = "layer_norm", attention_bias: biased = false, use_qk_norm: normed = false } = values;
			const norms = { layer_norm: "LayerNorm", rms_norm: "RMSNorm" } as const;
			if (typeof norm !== "string" || !Object.hasOwn(norms, norm)) {
				bad(`norm_type is ${JSON.stringify(norm)}, this program's vision tower has ${Object.keys(norms).join(" or ")}`);
			}
			if (norm === "rms_norm" && pooled === false) {
				bad("use_mean_pooling is false, which puts a LayerNorm behind layers of rms_norm");
			}
			return {
				...pictures,
				...{ classTokenLen: 1, visionClassTokenPositions: true, visionLayerScale: Number(scale) },
				...{ visionFinalLayernorm: pooled === false, visionPositionMode: "bicubic" },
				...{ visionAddQkvBias: biased === true, visionQkNorm: normed === true },
				visionNormalization: norms[norm as keyof typeof norms],
			};
		},
	},
	...{ qwen2_5_vl: qwen25, qwen2_5_vl_vision: qwen25 },
	...{ qwen3_vl: qwen3, qwen3_vl_vision: qwen3, qwen3_vl_moe: qwen3, qwen3_vl_moe_vision: qwen3 },
	...{ glm4v_moe: glm, glm4v_moe_vision: glm },
	...{ qwen3_5: qwen35, qwen3_5_vision: qwen35, qwen3_5_moe: qwen35, qwen3_5_moe_vision: qwen35 },
};

export const towerTypes: readonly string[] = Object.keys(types);

/** Whether a config.json's model_type is of one of these towers. */
export function isTowerType(type: unknown): type is string {
	return typeof type === "string" && Object.hasOwn(types, type);
}

/** The tower of a config.json's vision section, all of its layers. `named`: activations by their names in config.json. */
export function readTower(
	given: Json,
	named: Readonly<Record<string, Tower["visionActivation"]>>,
	refuse: Refuse,
): Tower {
	const { sizes, only, activation, names = {}, side, read } = types[given.model_type as string]!;
	const activations = activation === "silu" ? { silu: "swiglu" as const } : named;
	const renamed = Object.entries(names).map(([name, own]) => [name, given[own]]);
	const section: Json = { ...given, ...Object.fromEntries(renamed) };
	const bad: Refuse = (sentence) => refuse(sentence.replace(/\w+_\w+/g, (name) => names[name] ?? name));
	for (const [name, value] of Object.entries(only)) {
		const said = section[name] ?? value;
		if (said === value) continue;
		bad(`${name} is ${JSON.stringify(said)}, this program's vision tower has only ${JSON.stringify(value)}`);
	}
	const size = (name: string) => whole(section, name, sizes[name]!, bad);
	const [width, heads] = [size("hidden_size"), size("num_attention_heads")];
	if (width % heads !== 0) bad(`hidden_size is ${width}, no multiple of num_attention_heads (${heads})`);
	const act = section.hidden_act ?? activation;
	if (typeof act !== "string" || !Object.hasOwn(activations, act)) {
		bad(`hidden_act is ${JSON.stringify(act)}, this program's vision tower has ${Object.keys(activations).join(", ")}`);
	}
	const epsilon = section.layer_norm_eps ?? 1e-6;
	if (typeof epsilon !== "number" || !(epsilon > 0))
		bad(`layer_norm_eps is ${JSON.stringify(epsilon)}, expected a number`);
	const patchDim = squareOf(section, "patch_size", sizes, bad);
	const patches = side(section, patchDim, bad);
	return {
		visionNumLayers: size("num_hidden_layers"),
		visionHiddenSize: width,
		visionNumAttentionHeads: heads,
		visionKvChannels: width / heads,
		visionFfnHiddenSize: size("intermediate_size"),
		visionMaxImgH: Math.max(1, patches) * patchDim,
		visionMaxImgW: Math.max(1, patches) * patchDim,
		visionActivation: (activations as typeof named)[act as string]!,
		visionNormEpsilon: epsilon as number,
		...{ visionPatchBias: true, visionPatchNorm: false, visionAddQkvBias: true, visionAddBiasLinear: true },
		...{ visionQkNorm: false, visionFeatureLayers: null },
		...({ visionNormalization: "LayerNorm", visionWindowSize: null, fullattBlockIndexes: null } as const),
		patchDim,
		positions: patches ** 2,
		...read(section, bad),
	};
}

/**
 * A config.json of a SigLIP tower, alone or beside that of text, as that of a LLaVA which reads its last layer; any other as it is.
 * SigLIP 2 of fixed sizes is of the same type.
 */
export function asLlava(json: Json): Json {
	const whole = json.model_type === "siglip";
	if (!whole && json.model_type !== "siglip_vision_model") return json;
	const vision = whole ? { model_type: "siglip_vision_model", ...(json.vision_config as object | undefined) } : json;
	return {
		model_type: "llava",
		vision_config: vision,
		vision_feature_layer: -1,
		vision_feature_select_strategy: "full",
	};
}

/** A config.json of Qwen2.5-VL as published, whose language model's fields stand beside the tower's section, in the form of transformers 5. */
export function asNested(json: Json): Json {
	if (json.model_type !== "qwen2_5_vl" || json.text_config !== undefined) return json;
	const { vision_config: vision, architectures: _, model_type: type, ...text } = json;
	const nested = { text_config: { ...text, model_type: "qwen2_5_vl_text" } };
	return { ...json, ...nested, vision_config: { model_type: type, ...(vision as object | undefined) } };
}

/** LLaVA's, where config.json has none. */
export const defaultFeatureLayer = -2;

/**
 * The part of a tower that a vision-language model reads: the layers up to the one that it names (transformers'
 * vision_feature_layer), and the norm behind the last where it reads that too.
 */
export function tappedTower(tower: Tower, json: Json, bad: Refuse): Tower {
	const { model_type: type, vision_feature_layer: said } = json;
	if (type !== "llava" && type !== "internvl" && type !== "llava_onevision") return tower;
	const { vision_feature_select_strategy: strategy = type === "llava_onevision" ? "full" : "default" } = json;
	const layer = said ?? (type === "llava" ? defaultFeatureLayer : -1);
	const layers = tower.visionNumLayers;
	const listed = [layer].flat();
	const read = listed.map((one) => (Number(one) < 0 ? layers + 1 + Number(one) : Number(one)));
	const index = read.at(-1) ?? -1;
	if (
		!listed.every(Number.isSafeInteger) ||
		index < 0 ||
		index > layers ||
		(type === "internvl" && Array.isArray(layer))
	) {
		bad(`vision_feature_layer is ${JSON.stringify(layer)}, expected one of ${layers} layers`);
	}
	if (read.some((one, at) => at > 0 && !(one > read[at - 1]! && read[0]! > 0))) {
		bad(`vision_feature_layer is ${JSON.stringify(layer)}, of several only layers in ascending order can be read`);
	}
	const needed = tower.classTokenLen > 0 ? "default" : "full";
	if (strategy !== needed) {
		const why = needed === "full" ? "the tower has no class token to drop" : "its class token makes no row";
		bad(
			`vision_feature_select_strategy is ${JSON.stringify(strategy)}, only ${JSON.stringify(needed)} can be read: ${why}`,
		);
	}
	// InternVL reads its tower's end; LLaVA the output of a layer, which no norm follows.
	if (index === layers && type === "internvl") return tower;
	const before = read.length > 1 ? read.slice(0, -1).map((one) => one - 1) : null;
	return { ...tower, visionNumLayers: index, visionFinalLayernorm: false, visionFeatureLayers: before };
}

function sideOfImage(values: Json, patch: number, bad: Refuse): number {
	const pixels = squareOf(values, "image_size", types[values.model_type as string]!.sizes, bad);
	return Math.floor(pixels / patch);
}

function sideOf(positions: number, bad: Refuse): number {
	const side = Math.sqrt(positions);
	return Number.isInteger(side) ? side : bad(`num_patches is ${positions}, which is no square`);
}

/** A side of squares, which config.json gives once or for both directions. */
function squareOf(values: Json, name: string, sizes: TowerType["sizes"], bad: Refuse): number {
	const given = [values[name] ?? sizes[name]].flat();
	if (given.length > 2 || given.some((side) => side !== given[0]))
		bad(`${name} is ${JSON.stringify(given)}, no square`);
	return whole({ [name]: given[0] }, name, 1, bad);
}
