/**
 * Requests to a model: a prompt of the command line, or the records of a JSONL file, each a `prompt` (text) or
 * `messages` ([{role, content}]; `conversations` too), with `image` or `images` (files) at the `<image>` tags of the text.
 */
import { dirname, resolve } from "node:path";
import { SampleError } from "../data/energon/errors.ts";
import { imagesInTars } from "../data/energon/format/media.ts";
import { LARGEST_IMAGE } from "../data/import/fetch-image.ts";
import { type Conversation, crudeConversation } from "../data/vision-language/conversation.ts";
import { type EncodedImage, inspectImage } from "../data/vision-language/pixels.ts";
import { withImages } from "../data/vision-language/prompt.ts";
import type { Images } from "../native/images.ts";
import { UserError } from "../system/errors.ts";
import { linesOf, readWholeFile } from "../system/input-file.ts";
import { type JsonLimits, jsonText } from "../system/json.ts";

export interface Request {
	/** The request's name in messages: "the prompt", "questions.jsonl, line 7". */
	readonly name: string;
	/** The record it came in; empty for the command line's. */
	readonly record: Readonly<Record<string, unknown>>;
	/** Text that goes on as it is, or turns that the chat template is written around. */
	readonly kind: "text" | "conversation";
	readonly text: string;
	/** Image files, in order. */
	readonly images: readonly string[];
}

export interface JsonlRecord {
	/** "questions.jsonl, line 7". */
	readonly name: string;
	readonly record: Record<string, unknown>;
}

/** The longest line of a file of records. */
const recordLimits: JsonLimits = { bytes: 2 ** 24, values: 2 ** 20, depth: 64 };

/** The records of a JSONL file, one in memory at a time. Throws a UserError for a line that is no JSON object. */
export function* readJsonl(path: string): Generator<JsonlRecord> {
	let isEmpty = true;
	for (const { number, bytes } of linesOf(path, { limit: recordLimits.bytes, unended: true })) {
		const name = `${path}, line ${number}`;
		const line = jsonText(bytes, name, recordLimits);
		if (line.trim() === "") continue;
		let record: unknown;
		try {
			record = JSON.parse(line);
		} catch (error) {
			throw new UserError(`${name} is not JSON: ${(error as Error).message}.`);
		}
		if (typeof record !== "object" || record === null || Array.isArray(record)) {
			throw new UserError(`${name} is no JSON object.`);
		}
		isEmpty = false;
		yield { name, record: record as Record<string, unknown> };
	}
	if (isEmpty) throw new UserError(`${path} has no records.`);
}

/** The request of a record; `chat`: its `prompt` is what a user says. */
export function requestOf({ name, record }: JsonlRecord, path: string, chat: boolean): Request {
	const named = [record.images ?? record.image ?? []].flat();
	if (named.some((image) => typeof image !== "string")) {
		throw new UserError(`${name}: images are a list of file names.`);
	}
	const images = (named as string[]).map((image) => resolve(dirname(path), image));
	if (Array.isArray(record.messages ?? record.conversations)) {
		return { name, record, kind: "conversation", text: "", images };
	}
	const text = record.prompt ?? record.question ?? record.text;
	if (typeof text !== "string") throw new UserError(`${name} has neither a prompt nor messages.`);
	return { name, record, kind: chat ? "conversation" : "text", text, images };
}

/** Bytes of its images, with their sizes. Throws a UserError that names the file that cannot be read. */
export function openImages(request: Request, library: Images): EncodedImage[] {
	const { images } = request;
	const name = request.name.replace(/^The /, "the ");
	return images.map((path) => {
		const file = readWholeFile(path, LARGEST_IMAGE, { called: `the image ${path} of ${name}` });
		try {
			return inspectImage(library, file);
		} catch (error) {
			if (error instanceof UserError)
				throw new UserError(`The image ${path} of ${name}: ${error.message.replace(/\.?$/, ".")}`);
			throw error;
		}
	});
}

/** The turns of a request; `system`: said before them, or null. */
export function conversationOf(request: Request, images: readonly EncodedImage[], system: string | null): Conversation {
	const { record, name, text } = request;
	const asked = record.messages ?? record.conversations;
	const own = Array.isArray(asked) ? asked : [{ role: "user", content: text }];
	const messages = system === null ? own : [{ role: "system", content: system }, ...own];
	const fields: Record<string, unknown> = { json: { messages } };
	for (const [index, image] of images.entries()) fields[`${index}.png`] = image;
	const sample = { key: name, restoreKey: [], sources: [], subflavors: {}, type: "CrudeSample", fields };
	try {
		return crudeConversation(sample, { caption: "", ocr: "", classification: "" });
	} catch (error) {
		if (!(error instanceof SampleError)) throw error;
		const sentence = error.message.replace(`Sample ${name} cannot be trained on: `, `${name}: `);
		throw new UserError(sentence.replace(imagesInTars, "`images` lists their files"));
	}
}

/** The text of a request that is no conversation, with its images in place. */
export function fragmentsOf({ name, text, images }: Request) {
	const fragments = withImages(text, images.length);
	if (typeof fragments === "string") throw new UserError(`${name}: ${fragments}.`);
	return fragments;
}
