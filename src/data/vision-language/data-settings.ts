/**
 * Settings of one data set of a blend: `mimo` among its subflavors has keys of the configuration, which hold for its
 * samples alone. Energon hands subflavors on without looking at them.
 */
import * as v from "valibot";
import { energonKeys } from "../../config/keys/energon.ts";
import type { ImageDecodingName } from "../../native/abi.ts";
import { UserError } from "../../system/errors.ts";
import type { Subflavors } from "../energon/sample.ts";
import { type ChatTemplateText, readChatTemplate } from "../text/chat/template-file.ts";
import type { ImageSizing } from "./image-plan.ts";
import type { TemplateName } from "./prompt.ts";
import type { VisionLanguageTask } from "./task.ts";

/** Keys of the configuration that a data set may set for itself. */
const ownKeys = [
	"conversation-template",
	"chat-template",
	"loss-roles",
	"image-tag-type",
	"image-decoding",
	"caption-prompt",
	"ocr-prompt",
	"classification-prompt",
	"image-mean",
	"image-std",
	"min-num-tiles",
	"max-num-tiles",
	"use-thumbnail",
	"dynamic-resolution-min-patches",
	"dynamic-resolution-max-patches",
	"dynamic-resolution-min-side",
	"data-too-long",
] as const satisfies readonly (keyof typeof energonKeys)[];

type OwnKey = (typeof ownKeys)[number];
type ValueOf<K extends OwnKey> = v.InferOutput<(typeof energonKeys)[K]["type"]["schema"]>;
type OwnValues = { readonly [K in OwnKey]?: ValueOf<K> };

/** The text before and after an image (Megatron's --image-tag-type). */
export const imageTags = { none: ["", ""], internvl: ["<img>", "</img>"], nvlm: ["<Image>", "</Image>"] } as const;

/** The keys that a data set sets for itself. Throws a UserError that names data set and key. */
function ownValues(subflavors: Subflavors, dataset: string): OwnValues {
	const { mimo } = subflavors;
	if (mimo === undefined) return {};
	if (typeof mimo !== "object" || mimo === null || Array.isArray(mimo)) {
		throw new UserError(`${dataset}: the subflavor mimo has to be a record of settings.`);
	}
	for (const [key, value] of Object.entries(mimo)) {
		if (!(ownKeys as readonly string[]).includes(key)) {
			throw new UserError(`${dataset}: the subflavor mimo has a key ${key}; a data set may set ${ownKeys.join(", ")}.`);
		}
		const { type } = energonKeys[key as OwnKey];
		if (v.is(type.schema, value)) continue;
		const given = JSON.stringify(value)?.slice(0, 100);
		throw new UserError(`${dataset}: ${key} of the subflavor mimo is ${given}; allowed is ${type.allowed}.`);
	}
	return mimo as OwnValues;
}

/** A task whose settings are all decided. */
export interface DatasetTask extends VisionLanguageTask {
	readonly imageDecoding: ImageDecodingName;
}

/**
 * The task as a data set of these subflavors has it. The decoding of images that the run's own configuration names holds for
 * all its data sets. `dataset`: for messages. Throws a UserError for a wrong setting.
 */
export function taskOfDataset(task: VisionLanguageTask, subflavors: Subflavors, dataset: string): DatasetTask {
	const own = ownValues(subflavors, dataset);
	const path = own["chat-template"];
	const chat = path === undefined ? task.chat : { ...task.chat, template: chatTemplate(path, task, dataset) };
	const template: TemplateName = own["conversation-template"] ?? (path === undefined ? task.template : "jinja");
	if (template === "jinja" && chat.template === null) {
		throw new UserError(`${dataset}: conversation-template jinja of the subflavor mimo needs a chat-template.`);
	}
	const { prompts, statistics } = task;
	return {
		...task,
		template,
		chat,
		lossRoles: own["loss-roles"] ?? task.lossRoles,
		imageTags: own["image-tag-type"] === undefined ? task.imageTags : imageTags[own["image-tag-type"]],
		imageDecoding: task.imageDecoding ?? own["image-decoding"] ?? "energon",
		prompts: {
			caption: own["caption-prompt"] ?? prompts.caption,
			ocr: own["ocr-prompt"] ?? prompts.ocr,
			classification: own["classification-prompt"] ?? prompts.classification,
		},
		statistics: {
			mean: own["image-mean"] ?? statistics.mean,
			deviation: own["image-std"] ?? statistics.deviation,
		},
		sizing: sizingOf(task.sizing, own),
		tooLong: own["data-too-long"] ?? task.tooLong,
	};
}

function chatTemplate(path: string, { tokenizer }: VisionLanguageTask, dataset: string): ChatTemplateText {
	try {
		return readChatTemplate(path, tokenizer?.tokenizer ?? null);
	} catch (error) {
		if (error instanceof UserError) throw new UserError(`${dataset}: ${error.message}`);
		throw error;
	}
}

function sizingOf(sizing: ImageSizing, own: OwnValues): ImageSizing {
	switch (sizing.mode) {
		case "fixed":
		case "blocks":
		case "anyres":
			return sizing;
		case "tiles":
			return {
				...sizing,
				minTiles: own["min-num-tiles"] ?? sizing.minTiles,
				maxTiles: own["max-num-tiles"] ?? sizing.maxTiles,
				thumbnail: own["use-thumbnail"] ?? sizing.thumbnail,
			};
		case "dynamic":
			return {
				...sizing,
				minPatches: own["dynamic-resolution-min-patches"] ?? sizing.minPatches,
				maxPatches: own["dynamic-resolution-max-patches"] ?? sizing.maxPatches,
				minSide: own["dynamic-resolution-min-side"] ?? sizing.minSide,
			};
	}
}
