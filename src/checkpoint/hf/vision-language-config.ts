/**
 * config.json of a whole vision-language model as transformers' NemotronH_Omni_Reasoning_V3 reads it, for a model that came
 * from folders of its parts or was never in one.
 */
import { pythonFloat } from "./json.ts";
import type { ProjectorSizes } from "./projector-names.ts";
import type { TowerSizes } from "./tower-names.ts";

/** Frames that the class joins; it cannot be told that there are no videos. */
const temporalPatch = 2;

type Json = Readonly<Record<string, unknown>>;

const activationNames = { gelu: "gelu", "gelu-tanh": "gelu_pytorch_tanh" } as const;

/** RadioConfig of a tower; the fields of `original` beside the sizes stay. */
export function towerJson(
	tower: TowerSizes,
	activation: keyof typeof activationNames,
	dtype: string,
	original: Json = {},
): Json {
	const kept = original.model_type === "radio" ? original : {};
	const { classTokenLen: tokens, patchDim: patch } = tower;
	const classes = typeof kept.num_cls_tokens === "number" ? Math.min(kept.num_cls_tokens, tokens) : Math.min(1, tokens);
	return {
		...kept,
		model_type: "radio",
		hidden_size: tower.visionHiddenSize,
		num_hidden_layers: tower.visionNumLayers,
		num_attention_heads: tower.visionNumAttentionHeads,
		mlp_ratio: ratio(tower.visionFfnHiddenSize, tower.visionHiddenSize),
		hidden_act: activationNames[activation],
		patch_size: patch,
		max_img_size: Math.sqrt(tower.positions) * patch,
		num_cls_tokens: classes,
		num_registers: tokens - classes,
		summary_idxs: Array.isArray(kept.summary_idxs) ? kept.summary_idxs : classes > 0 ? [0] : [],
		video_temporal_patch_size: temporalPatch,
		dtype,
	};
}

/** A quotient that times `width`, cut to an integer as transformers does, is `ffn` again. */
function ratio(ffn: number, width: number): unknown {
	let value = ffn / width;
	while (Math.trunc(width * value) < ffn) value += 2 ** -40;
	return pythonFloat(value);
}

/** The whole; `language` is the language model's config.json. */
export function wholeJson(parts: {
	readonly language: Json;
	readonly tower: Json;
	/** null: left out. */
	readonly projector: ProjectorSizes | null;
	readonly imageTokenId: number | null;
	readonly dtype: string;
}): Json {
	return {
		architectures: ["NemotronH_Omni_Reasoning_V3"],
		model_type: "nemotron_h_omni",
		text_config: parts.language,
		vision_config: parts.tower,
		vision_hidden_size: parts.tower.hidden_size,
		...(parts.projector ? { projector_hidden_size: parts.projector.visionProjectionFfnHiddenSize } : {}),
		downsample_ratio: 0.5,
		image_token_id: parts.imageTokenId,
		video_temporal_patch_size: temporalPatch,
		dtype: parts.dtype,
	};
}
