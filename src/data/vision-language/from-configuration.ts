/** The task that a training configuration stands for: samples to tokens and patches. */
import { hasEncoder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { encoderConfig } from "../../models/vision/from-configuration.ts";
import { clipStatistics } from "../../native/images.ts";
import type { ImageSizing } from "./image-plan.ts";
import { type VisionLanguageTask, visionLanguageDefaults } from "./task.ts";

/** What is written before and after an image (Megatron's --image-tag-type). */
const imageTags = { none: ["", ""], internvl: ["<img>", "</img>"], nvlm: ["<Image>", "</Image>"] } as const;

export function taskOf(c: TrainingConfiguration): VisionLanguageTask {
	return {
		...visionLanguageDefaults,
		tokenizer: c.tokenizer,
		vocabularySize: c.vocabSize,
		sequenceLength: c.seqLength,
		imageTokenId: c.imageTokenId,
		acceptsImages: hasEncoder(c),
		beginId: c.dataBeginId,
		endId: c.dataEndId,
		packing: c.packingMethod,
		padId: c.dataPadId,
		template: c.conversationTemplate,
		lossRoles: c.lossRoles,
		imageTags: imageTags[c.imageTagType],
		prompts: {
			caption: c.captionPrompt ?? "",
			ocr: c.ocrPrompt ?? "",
			classification: c.classificationPrompt ?? "",
		},
		sizing: sizingOf(c),
		tower: encoderConfig(c).tower,
		statistics: clipStatistics,
	};
}

function sizingOf(c: TrainingConfiguration): ImageSizing {
	if (c.dynamicResolution) {
		return {
			mode: "dynamic",
			minPatches: c.dynamicResolutionMinPatches,
			maxPatches: c.dynamicResolutionMaxPatches,
			minSide: c.dynamicResolutionMinSide,
		};
	}
	if (c.useTiling) return { mode: "tiles", tileSize: c.imgH, maxTiles: c.maxNumTiles, thumbnail: c.useThumbnail };
	return { mode: "fixed", width: c.imgW, height: c.imgH };
}
