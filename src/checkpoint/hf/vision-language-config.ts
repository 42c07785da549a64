/**
 * config.json of a whole vision-language model as transformers' NemotronH_Omni_Reasoning_V3 reads it, for a model that came
 * from folders of its parts or was never in one.
 */
import { decodeFloats, dtypes, encodeFloats } from "../dtype.ts";
import { type TensorStore, typeOf } from "../store.ts";
import { pythonFloat } from "./json.ts";
import type { ProjectorSizes } from "./projector-names.ts";
import { outsideNames, type TowerSizes, type TowerSpelling } from "./vision-names.ts";

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

/** LLaVA, of a SigLIP tower and a language model. */
export function llavaJson(parts: {
	readonly language: Json;
	readonly tower: Json;
	/** The layer whose output makes the rows; −1: the last. */
	readonly layer: number;
	/** Rows of a picture. */
	readonly rows: number;
	readonly imageTokenId: number | null;
	readonly dtype: string;
}): Json {
	const { architectures: _, transformers_version: __, ...tower } = parts.tower;
	return {
		architectures: ["LlavaForConditionalGeneration"],
		model_type: "llava",
		text_config: parts.language,
		// The head that pools patches to one row is not written.
		vision_config: { ...tower, vision_use_head: false },
		...{ vision_feature_layer: parts.layer, vision_feature_select_strategy: "full" },
		...{ projector_hidden_act: "gelu", multimodal_projector_bias: true },
		...{ image_seq_length: parts.rows, image_token_index: parts.imageTokenId, dtype: parts.dtype },
		tie_word_embeddings: parts.language.tie_word_embeddings === true,
	};
}

// The embedder of videos that transformers' class has beside that of pictures. A model that was made without one gets
// it from the picture's: tiled over the frames that are joined and divided by their number (docs/spec/vision.md
// §1.9), so that frames of one picture look as the picture does.

export function videoEmbedderName({ prefix, style }: TowerSpelling): string {
	return `${prefix}${style === "published" ? "patch_generator.video_embedder" : "embeddings.video_patch_projection"}.weight`;
}

/** A store of that one tensor, made of the tower's tensors as `source` names them. */
export function grownVideoEmbedder(source: TensorStore, spelling: TowerSpelling, frames: number): TensorStore {
	const picture = outsideNames(spelling).embedder;
	const { dtype, shape } = typeOf(source, picture);
	const [rows, width] = shape as [number, number];
	const bytes = dtypes[dtype].bits / 8;
	return {
		path: source.path,
		tensors: new Map([[videoEmbedderName(spelling), { dtype, shape: [rows, frames * width] }]]),
		originsOf: () => [{ store: source, name: picture }],
		readInto: (_, offset, into) => {
			const row = new Uint8Array(width * bytes);
			for (let done = 0; done < into.byteLength; ) {
				const at = offset + done;
				source.readInto(picture, Math.floor(at / (frames * row.length)) * row.length, row);
				const scaled = encodeFloats(
					dtype,
					Float64Array.from(decodeFloats(dtype, row), (value) => value / frames),
				);
				const part = scaled.subarray(at % row.length, (at % row.length) + into.byteLength - done);
				into.set(part, done);
				done += part.length;
			}
		},
		[Symbol.dispose]: () => {},
	};
}
