/**
 * Refusal of settings and media of data sets that training would ignore, and the samples that do not fit the sequence length
 * whole.
 */
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { mediaOfRecord } from "../energon/format/media.ts";
import { type Sample, tokenSample } from "../energon/sample.ts";
import type { LoadedDataset } from "../energon/task-encoder.ts";
import type { Chat } from "../text/chat/chat.ts";
import type { Tokenizer } from "../text/tokenizer.ts";
import { conversationOf } from "./conversation.ts";
import { type DatasetTask, taskOfDataset } from "./data-settings.ts";
import { encodePieces } from "./encoding.ts";
import { decodedAs } from "./pixels.ts";
import { beginOf, render } from "./prompt.ts";
import { chatOf, type VisionLanguageTask } from "./task.ts";

/** Records of a JSONL file that are looked at when it is opened. */
const LOOKED_AT = 100;

/**
 * Throws a UserError for JSONL records that name images which no auxiliary data have, video or audio, for settings of a data
 * set that cannot be, and for chat templates that take too much.
 */
export function checkTrainable(datasets: readonly LoadedDataset[], task: VisionLanguageTask): void {
	const tried = new Set<string>();
	for (const { path, aux, records, subflavors } of datasets) {
		const own = taskOfDataset(task, subflavors, path);
		const { template } = own.chat;
		if (own.template === "jinja" && template !== null && !tried.has(template.text)) {
			tried.add(template.text);
			chatOf(own, { specialTokens: [], addedText: () => null });
		}
		if (records === null) continue;
		const count = Math.min(LOOKED_AT, records.length);
		for (let i = 0; i < count; i++) {
			const index = Math.floor((i * records.length) / count);
			const media = mediaOfRecord(records.read(index), path, aux.length > 0);
			if (media !== null) throw new UserError(`${path}, record ${index}: ${media}.`);
		}
	}
}

// Finds samples that do not fit the sequence length whole.

/** Tokens up to which the whole length of a sample is counted. */
const COUNTED = 2 ** 20;

/**
 * A function that describes, as the end of a sentence, what is cut off a sample; null if all fits. It throws a SampleError as
 * training does.
 */
export function cutOff(task: VisionLanguageTask, tokenizer: Tokenizer): (sample: Sample) => string | null {
	const encoders = new Map<string, ReturnType<typeof datasetCutOff>>();
	return (sample) => {
		const settings = JSON.stringify(sample.subflavors.mimo) ?? "";
		let own = encoders.get(settings);
		if (own === undefined) {
			const dataset = sample.sources[0]?.datasetPath ?? "The data set";
			own = datasetCutOff({ ...taskOfDataset(task, sample.subflavors, dataset), tooLong: "truncate" }, tokenizer);
			encoders.set(settings, own);
		}
		return own(sample);
	};
}

function datasetCutOff(task: DatasetTask, tokenizer: Tokenizer): (sample: Sample) => string | null {
	const chat = task.template === "jinja" ? chatOf(task, tokenizer) : null;
	// Indexed text is cut into samples that fit.
	return (sample) => (sample.type === tokenSample ? null : cutOffSample(sample, task, tokenizer, chat));
}

function cutOffSample(sample: Sample, task: DatasetTask, tokenizer: Tokenizer, chat: Chat | null): string | null {
	const { sequenceLength, imageTokenId, mostPatches } = task;
	const conversation = conversationOf(sample, task.prompts);
	const pieces = render(sample.key, conversation, task, chat);
	const decodable = conversation.images.map((image) => decodedAs(image, task.imageDecoding));
	const options = { ...task, beginId: beginOf(task, tokenizer, conversation.turns) };
	const encode = (length: number) =>
		encodePieces(sample.key, pieces, decodable, tokenizer, { ...options, sequenceLength: length });
	const kept = encode(sequenceLength);
	const rows = kept.ids.filter((id) => id === imageTokenId).length;
	const [images, all] = [kept.images.length, conversation.images.length];
	if (images < all) {
		const bound = mostPatches === null ? "" : ` and ${mostPatches} patches (--packing-max-patches)`;
		return `${all - images} of its ${all} images do not fit into ${sequenceLength} tokens (--seq-length)${bound}`;
	}
	if (kept.ids.length < sequenceLength) return null;
	const text = encode(COUNTED).ids.filter((id) => id !== imageTokenId).length;
	if (text + rows <= sequenceLength) return null;
	return `it has ${counted(text, "token")} of text and ${rows} of images, and is cut at ${sequenceLength} (--seq-length)`;
}
