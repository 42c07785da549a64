/** The task that a training configuration stands for: samples to tokens and patches. */
import { hasEncoder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { countFlopsPerToken } from "../../models/language/counts.ts";
import { encoderConfig } from "../../models/vision/from-configuration.ts";
import { encoderFlops, visionEncoder } from "../../models/vit/tower.ts";
import { readChatTemplate } from "../text/chat/template-file.ts";
import { tokenizerKeysOf } from "../text/configured-tokenizer.ts";
import { imageTags } from "./data-settings.ts";
import type { ImageSizing } from "./image-plan.ts";
import { type VisionLanguageTask, visionLanguageDefaults } from "./task.ts";

/** Reads the chat template; throws a UserError for one that cannot be read. */
export function taskOf(c: TrainingConfiguration): VisionLanguageTask {
	return {
		...visionLanguageDefaults,
		tokenizer: tokenizerKeysOf(c),
		vocabularySize: c.vocabSize,
		sequenceLength: c.seqLength,
		// No id: in a language model without an encoder image-token-id is a token of text.
		imageTokenId: hasEncoder(c) ? c.imageTokenId : -1,
		acceptsImages: hasEncoder(c),
		beginId: c.dataBeginId,
		endId: c.dataEndId,
		packing: c.packingMethod,
		imageWork: hasEncoder(c) ? imageWorkOf(c) : null,
		mostPatches: c.packingMaxPatches,
		padId: c.dataPadId,
		template: c.conversationTemplate,
		chat: {
			template:
				c.conversationTemplate === "jinja" ? readChatTemplate(c.chatTemplate ?? c.tokenizer!, c.tokenizer) : null,
			variables: c.chatTemplateKwargs === null ? {} : JSON.parse(c.chatTemplateKwargs),
			date: c.chatTemplateDate,
		},
		dataSpecialTokens: c.dataSpecialTokens ?? [],
		tooLong: c.dataTooLong,
		lossRoles: c.lossRoles,
		imageTags: imageTags[c.imageTagType],
		prompts: {
			caption: c.captionPrompt ?? "",
			ocr: c.ocrPrompt ?? "",
			classification: c.classificationPrompt ?? "",
		},
		sizing: sizingOf(c),
		tower: encoderConfig(c).tower,
		imageDecoding: c.imageDecoding,
		mrope: c.mropeSection !== null,
		resampling: c.imageResampling,
		statistics: { mean: c.imageMean, deviation: c.imageStd },
	};
}

/**
 * The operations of training on an image, over those of the language model on a sequence: those of three sizes decide a p² + b p + c.
 * Times of a run would make the order of samples another one in every run, and weights that are frozen another one in every stage.
 */
function imageWorkOf(c: TrainingConfiguration): VisionLanguageTask["imageWork"] {
	const parts = visionEncoder(encoderConfig(c));
	const sequence = countFlopsPerToken(c).forwardBackward * c.seqLength;
	const side = 32;
	// Backward has twice the operations of forward.
	const of = (squares: number) => (3 * encoderFlops(parts, { rows: side, columns: squares * side })) / sequence;
	const [one, two, three] = [of(1), of(2), of(3)];
	const a = (three - 2 * two + one) / 2;
	const b = two - one - 3 * a;
	return [a / side ** 4, b / side ** 2, one - a - b];
}

/** Tiles of the sizes that keep most of an image. */
export function anyResolution({
	imageGridPinpoints,
	imgH: tileSize,
	maxAnyresTiles: maxTiles,
}: Pick<TrainingConfiguration, "imgH" | "maxAnyresTiles"> & {
	readonly imageGridPinpoints: readonly string[];
}): ImageSizing {
	const pinpoints = imageGridPinpoints.map((size) => {
		const [height, width] = size.split("x").map(Number) as [number, number];
		return { height, width };
	});
	return { mode: "anyres", tileSize, pinpoints, maxTiles };
}

function sizingOf(c: TrainingConfiguration): ImageSizing {
	if (c.dynamicResolution && c.maxPixels !== null) {
		const { minPixels, maxPixels, dynamicResolutionMinSide: minSide } = c;
		return { mode: "blocks", minPixels, maxPixels, minSide };
	}
	if (c.dynamicResolution) {
		return {
			mode: "dynamic",
			minPatches: c.dynamicResolutionMinPatches,
			maxPatches: c.dynamicResolutionMaxPatches,
			minSide: c.dynamicResolutionMinSide,
		};
	}
	const { imageGridPinpoints } = c;
	if (imageGridPinpoints !== null) return anyResolution({ ...c, imageGridPinpoints });
	if (c.useTiling) {
		return {
			mode: "tiles",
			tileSize: c.imgH,
			minTiles: c.minNumTiles,
			maxTiles: c.maxNumTiles,
			areaWeighted: c.useAreaWeightedAspectRatio,
			thumbnail: c.useThumbnail,
			tags: c.useTileTags,
		};
	}
	return { mode: "fixed", width: c.imgW, height: c.imgH };
}
