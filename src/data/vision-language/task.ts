/** The task of training a vision-language model: samples → conversations → tokens and patches → packs → microbatches. */
import type { ImageDecodingName } from "../../native/abi.ts";
import type { ChannelStatistics, Images } from "../../native/images.ts";
import { UserError } from "../../system/errors.ts";
import { FatalSampleError, type Remark } from "../energon/errors.ts";
import { hook } from "../energon/hook.ts";
import { type Keyed, type Sample, tokenSample } from "../energon/sample.ts";
import type { Cooker, TaskEncoder } from "../energon/task-encoder.ts";
import { type Microbatch, mediaPositions } from "../microbatch.ts";
import { type Share, wholeShare } from "../routing/image-share.ts";
import { Chat } from "../text/chat/chat.ts";
import type { ChatTemplateText } from "../text/chat/template-file.ts";
import type { TokenizerKeys } from "../text/configured-tokenizer.ts";
import type { Tokenizer } from "../text/tokenizer.ts";
import {
	buildBatch,
	type Decode,
	decodeImages,
	type EncodedSample,
	gridsOf,
	type ImageTextBatch,
	type Pack,
	placesOfImages,
	sampleName,
} from "./batch.ts";
import { conversationOf, type Prompts, type Role } from "./conversation.ts";
import { type DatasetTask, taskOfDataset } from "./data-settings.ts";
import { type EncodingOptions, encodePieces, encodeTokens } from "./encoding.ts";
import { choosePacks, type PackingMethod, type Size } from "./packing.ts";
import { decodedAs, imagePatches, inspectImage, type Resampling, remarkOf } from "./pixels.ts";
import { beginOf, render, type TemplateName } from "./prompt.ts";

/** Settings of a Jinja chat template. */
interface ChatSettings {
	/** The Jinja template; null: no template is used. */
	readonly template: ChatTemplateText | null;
	/** Further variables. */
	readonly variables: Readonly<Record<string, unknown>>;
	/** The date that it takes for today; null: it has none. */
	readonly date: string | null;
}

/** Plain values, so that they reach other threads. */
export interface VisionLanguageTask extends EncodingOptions {
	readonly kind: "vision-language";
	/** Null: bytes. */
	readonly tokenizer: TokenizerKeys | null;
	/** Ids the model has; null = any. */
	readonly vocabularySize: number | null;
	/** False for a language model without an encoder: samples with images end the run. */
	readonly acceptsImages: boolean;
	readonly template: TemplateName;
	readonly chat: ChatSettings;
	/** Special tokens that samples may write. */
	readonly dataSpecialTokens: readonly string[];
	readonly lossRoles: readonly Role[] | null;
	readonly imageTags: readonly [before: string, after: string];
	readonly prompts: Prompts;
	/** null: Energon's for data sets that do not set their own, transformers' for other image files. */
	readonly imageDecoding: ImageDecodingName | null;
	readonly statistics: ChannelStatistics;
	readonly resampling: Resampling;
	/** Whether tokens have positions by the pictures among them (multimodal rotary embedding). */
	readonly mrope: boolean;
	readonly packing: PackingMethod;
	/** a, b and c of the work a p² + b p + c of encoding an image of p patches; null: the model has no encoder. */
	readonly imageWork: readonly [a: number, b: number, c: number] | null;
	/** Fill every sample or pack up to the sequence length. */
	readonly pad: boolean;
	readonly padId: number;
	/** The half that is handed on: encoder ranks need no text; language ranks need no pixels, and decode no images. */
	readonly keep: "both" | "text" | "images";
	/** Part of every batch's images that is decoded and handed on: encoder ranks may share a lane. */
	readonly share: Share;
}

const noPrompts: Prompts = { caption: "", ocr: "", classification: "" };

/** Everything but what depends on the model. */
export const visionLanguageDefaults = {
	kind: "vision-language",
	tokenizer: null,
	vocabularySize: null,
	acceptsImages: true,
	template: "plain",
	chat: { template: null, variables: {}, date: null },
	dataSpecialTokens: [],
	tooLong: "truncate",
	lossRoles: null,
	imageTags: ["", ""],
	imageDecoding: null,
	prompts: noPrompts,
	beginId: null,
	endId: null,
	resampling: "pillow",
	mrope: false,
	packing: "carry-over",
	imageWork: null,
	mostPatches: null,
	pad: true,
	padId: 0,
	keep: "both",
	share: wholeShare,
} as const satisfies Partial<VisionLanguageTask>;

/** Crude samples stay what they are: conversationOf reads them. */
const asItIs: Cooker = { cook: hook("cook", (sample: Sample) => sample), hasSubflavors: {} };

/** Samples to tokens, their images waiting as files. Throws a UserError for a tokenizer that the model is too small for. */
function sampleEncoder(
	task: VisionLanguageTask,
	tokenizer: Tokenizer,
	remark: Remark,
): (sample: Sample) => EncodedSample {
	const { sequenceLength, vocabularySize } = task;
	if (!(Number.isInteger(sequenceLength) && sequenceLength >= 2)) {
		throw new UserError(`A sequence length of ${sequenceLength} has no next token to learn; it must be 2 or more.`);
	}
	if (vocabularySize !== null && tokenizer.vocabularySize > vocabularySize) {
		throw new UserError(
			`The tokenizer has ${tokenizer.vocabularySize} tokens, more than vocab-size ${vocabularySize}.`,
		);
	}
	const encoders = new Map<string, ReturnType<typeof datasetEncoder>>();
	return (sample) => {
		const { subflavors, sources } = sample;
		const settings = JSON.stringify(subflavors.mimo) ?? "";
		let encode = encoders.get(settings);
		if (encode === undefined) {
			const own = taskOfDataset(task, subflavors, sources[0]?.datasetPath ?? "The data set");
			encode = datasetEncoder(own, tokenizer, remark);
			encoders.set(settings, encode);
		}
		return encode(sample);
	};
}

/** The encoder of the samples of data sets that have this task. */
function datasetEncoder(task: DatasetTask, tokenizer: Tokenizer, remark: Remark): (sample: Sample) => EncodedSample {
	const chat = task.template === "jinja" ? chatOf(task, tokenizer) : null;
	return (sample) => {
		if (sample.type === tokenSample) return encodeTokens(sample, task);
		const conversation = conversationOf(sample, task.prompts);
		if (!task.acceptsImages && conversation.images.length > 0) {
			throw new FatalSampleError(`Sample ${sampleName(sample)} has images, but the model has no encoder.`);
		}
		for (const image of conversation.images) {
			const sentence = remarkOf(image, `An image of sample ${sampleName(sample)}`);
			if (sentence !== null) remark(sentence);
		}
		const pieces = render(sample.key, conversation, task, chat);
		const decodable = conversation.images.map((image) => decodedAs(image, task.imageDecoding));
		const options = { ...task, beginId: beginOf(task, tokenizer, conversation.turns) };
		const { ids, labels, images } = encodePieces(sample.key, pieces, decodable, tokenizer, options);
		const { restoreKey, key, sources } = sample;
		const { statistics } = task;
		return { restoreKey, key, sources, ids, labels, images: images.map((image) => ({ ...image, statistics })) };
	};
}

/** The chat template of a task. A template that knows images writes the image token's own text, or <image>. */
export function chatOf(
	{ chat, imageTokenId, dataSpecialTokens }: Pick<VisionLanguageTask, "chat" | "imageTokenId" | "dataSpecialTokens">,
	tokenizer: Pick<Tokenizer, "specialTokens" | "addedText">,
): Chat {
	const { template, variables, date } = chat;
	return new Chat(template!, {
		specialTokens: tokenizer.specialTokens,
		dataSpecialTokens,
		imageText: tokenizer.addedText(imageTokenId) ?? "<image>",
		variables: { ...(date === null ? {} : { strftime_now: (format: string) => strftime(date, format) }), ...variables },
	});
}

/** The steps of the task before packing: enough to look at samples. */
export function encodingSteps(task: VisionLanguageTask, tokenizer: Tokenizer, images: Images, remark: Remark) {
	return {
		decode: { images: (bytes: Uint8Array) => inspectImage(images, bytes) },
		cookers: [asItIs],
		preencodeSample: hook("encode the sample", sampleEncoder(task, tokenizer, remark)),
	} satisfies Partial<TaskEncoder>;
}

export function buildVisionLanguageTask(
	task: VisionLanguageTask,
	tokenizer: Tokenizer,
	images: Images,
	remark: Remark,
): TaskEncoder {
	const { tower, sequenceLength } = task;
	const most = { tokens: sequenceLength, patches: task.mostPatches ?? Number.POSITIVE_INFINITY };
	const sizeOf = (sample: EncodedSample): Size => {
		const patches = gridsOf(sample, tower.patchSize).map(({ rows, columns }) => rows * columns);
		const [a, b, c] = task.imageWork ?? [0, 0, 0];
		const sum = (value: (patches: number) => number) => patches.reduce((total, count) => total + value(count), 0);
		return { tokens: sample.ids.length, patches: sum((p) => p), work: sum((p) => a * p ** 2 + b * p + c) };
	};
	const padding = { padTo: task.pad ? sequenceLength : null, padId: task.padId };
	const { resampling } = task;
	const decode: Decode = (image) => imagePatches(images, { ...image, resampling }, tower.patchSize);
	const batch = (elements: readonly Keyed[]): ImageTextBatch => {
		const packs = elements.map((element) => ("samples" in element ? element : { samples: [element] }) as Pack);
		const { text: plain, ...samples } = buildBatch(packs, padding);
		const places = placesOfImages(packs, tower.patchSize);
		const merge = tower.pixelShuffle ? 2 : 1;
		const positions = task.mrope
			? mediaPositions(plain, places.grids, { placeholder: task.imageTokenId, merge })
			: null;
		const text = positions === null ? plain : { ...plain, positions };
		const read = { restoreKey: [], ...samples, imageCount: places.grids.length };
		if (task.keep === "text") return { ...read, text, images: places, damaged: [] };
		const decoded = decodeImages(packs, task.share, tower.patchSize, decode);
		return { ...read, text: task.keep === "both" ? text : { ...text, ...nothing() }, ...decoded };
	};
	return {
		...encodingSteps(task, tokenizer, images, remark),
		selectSamplesToPack: hook("choose samples to pack", (samples) =>
			choosePacks(samples as readonly EncodedSample[], sizeOf, most, task.packing),
		),
		packSelectedSamples: hook("pack samples", (samples) => ({ restoreKey: [], samples }) as Keyed),
		batch: hook("batch", batch),
	};
}

/** The text of a receiver that has no use for it; arrays of its own, since they move to other threads. */
function nothing(): Pick<Microbatch, "ids" | "labels" | "lossMask" | "positions"> {
	return { ids: new Int32Array(0), labels: new Int32Array(0), lossMask: new Float32Array(0) };
}

// Dates as Python's strftime writes them in the C locale, for templates that put today's date into a conversation.

const days = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const months = [
	...["January", "February", "March", "April", "May", "June", "July"],
	...["August", "September", "October", "November", "December"],
];
const two = (value: number) => String(value).padStart(2, "0");

/** Midnight of a day, "2026-01-31", in the format. Codes that it does not know stay as they are. */
export function strftime(date: string, format: string): string {
	const day = new Date(`${date}T00:00:00Z`);
	const month = months[day.getUTCMonth()]!;
	const weekday = days[day.getUTCDay()]!;
	const [year, number] = [String(day.getUTCFullYear()), two(day.getUTCDate())];
	const codes: Readonly<Record<string, string>> = {
		Y: year,
		y: year.slice(-2),
		m: two(day.getUTCMonth() + 1),
		d: number,
		B: month,
		b: month.slice(0, 3),
		A: weekday,
		a: weekday.slice(0, 3),
		H: "00",
		M: "00",
		S: "00",
		"%": "%",
		F: `${year}-${two(day.getUTCMonth() + 1)}-${number}`,
	};
	return format.replace(/%([a-zA-Z%])/g, (code, letter: string) => codes[letter] ?? code);
}
