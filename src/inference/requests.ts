/**
 * Requests to a model: a prompt of the command line, or the records of a JSONL file, each a `prompt` (text) or
 * `messages` ([{role, content}]; `conversations` too), with `image` or `images` (files) at the `<image>` tags of the text.
 */

import { existsSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { parsePythonJson } from "../checkpoint/index.ts";
import { hasEncoder, hasTokenizer } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { SampleError } from "../data/energon/errors.ts";
import { imagesInTars } from "../data/energon/format/media.ts";
import { parseJsonBytes } from "../data/energon/format/python-text.ts";
import { LARGEST_IMAGE } from "../data/import/fetch-image.ts";
import type { Chat } from "../data/text/chat/chat.ts";
import { configuredTokenizer, requireRoom } from "../data/text/configured-tokenizer.ts";
import type { Tokenizer } from "../data/text/tokenizer.ts";
import { type Conversation, crudeConversation } from "../data/vision-language/conversation.ts";
import { taskOf } from "../data/vision-language/from-configuration.ts";
import { decodedAs, type EncodedImage, inspectImage, remarkOf } from "../data/vision-language/pixels.ts";
import {
	beginOf,
	type EncodedPrompt,
	encodePrompt,
	promptPieces,
	textPieces,
	withImages,
} from "../data/vision-language/prompt.ts";
import { chatOf, type VisionLanguageTask } from "../data/vision-language/task.ts";
import type { Images } from "../native/images.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { linesOf, readWholeFile } from "../system/input-file.ts";
import { configLimits, type JsonLimits, jsonText, readJsonText } from "../system/json.ts";

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
			record = parseJsonBytes(Buffer.from(line));
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
function openImages(request: Request, library: Images): EncodedImage[] {
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
function conversationOf(request: Request, images: readonly EncodedImage[], system: string | null): Conversation {
	const { record, name, text } = request;
	const asked = record.messages ?? record.conversations;
	const own = Array.isArray(asked) ? asked : [{ role: "user", content: text }];
	const messages = system === null ? own : [{ role: "system", content: system }, ...own];
	const fields: Record<string, unknown> = { json: { messages, tools: record.tools } };
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
function fragmentsOf({ name, text, images }: Request) {
	const fragments = withImages(text, images.length);
	if (typeof fragments === "string") throw new UserError(`${name}: ${fragments}.`);
	return fragments;
}

// Encodes requests for the model: token ids and images, by the configuration's tokenizer and chat template.

export interface ReadRequest extends EncodedPrompt {
	readonly request: Request;
}

export class RequestReader {
	readonly tokenizer: Tokenizer;
	readonly task: VisionLanguageTask;
	readonly #chat: Chat | null;
	/** Tokens that end an answer. */
	readonly endIds: readonly number[];

	/**
	 * `bytes`: a model without a tokenizer reads bytes; a checkpoint of ours says so by having none, a Hugging Face folder does
	 * not. Throws a UserError when there is no tokenizer, or one that the model is too small for.
	 */
	constructor(
		readonly c: TrainingConfiguration,
		private readonly images: Images,
		bytes: boolean,
		/** Receives sentences about images that are used nevertheless. */
		private readonly remark: (sentence: string) => void = () => {},
	) {
		if (!hasTokenizer(c) && c.loadHf !== null && !bytes) {
			throw new UserError(
				`${c.loadHf} (load-hf) has no tokenizer.json: --tokenizer names the model's, and --bytes is for a model that reads bytes.`,
			);
		}
		this.tokenizer = configuredTokenizer(c);
		requireRoom(this.tokenizer, c);
		this.task = taskOf(c);
		this.#chat = this.task.template === "jinja" ? chatOf(this.task, this.tokenizer) : null;
		this.endIds = this.#endIds();
	}

	/** The images of a request. Throws a UserError where one cannot be read, or the model reads none. */
	openImages(request: Request): EncodedImage[] {
		if (request.images.length > 0 && !hasEncoder(this.c)) {
			throw new UserError(
				`${request.name} has the image ${request.images[0]}, but the model reads text alone: it has no vision encoder.`,
			);
		}
		return openImages(request, this.images);
	}

	/** `system`: text of the system turn that begins a conversation, or null. Throws a UserError where the model cannot read it. */
	read(request: Request, system: string | null = null): ReadRequest {
		const { task } = this;
		const files = this.openImages(request);
		const conversation = request.kind === "conversation" ? conversationOf(request, files, system) : null;
		const pieces =
			conversation === null
				? textPieces(fragmentsOf(request), task.imageTags)
				: promptPieces(request.name, conversation, task, this.#chat);
		const options = { ...task, beginId: beginOf(task, this.tokenizer, conversation?.turns) };
		for (const [i, file] of files.entries()) {
			const sentence = remarkOf(file, request.images[i]!);
			if (sentence !== null) this.remark(sentence);
		}
		const decodable = files.map((file) => decodedAs(file, task.imageDecoding ?? "transformers"));
		const prompt = encodePrompt(request.name, pieces, decodable, this.tokenizer, options);
		if (prompt.ids.length === 0) throw new UserError(`${request.name} has no tokens: there is nothing to go on with.`);
		return { request, ...prompt };
	}

	/** Throws a UserError unless `more` tokens after the prompt have positions in the model. */
	requirePositions({ request, ids }: ReadRequest, more: number): void {
		const most = this.c.maxPositionEmbeddings;
		if (ids.length + more <= most) return;
		const limit = `the ${most} positions of the model (--max-position-embeddings)`;
		throw new UserError(
			ids.length >= most
				? `${request.name} has ${counted(ids.length, "token")}, which leaves no room for an answer among ${limit}.`
				: `${request.name} has ${counted(ids.length, "token")} and is to get ${more} more: together more than ${limit}.`,
		);
	}

	/** The text of ids; ids that the tokenizer does not have are left out. */
	decode(ids: readonly number[]): string {
		return this.tokenizer.decode(ids.filter((id) => id < this.tokenizer.vocabularySize));
	}

	#endIds(): number[] {
		const { c, tokenizer } = this;
		// A checkpoint of ours names the folder of the model that it began with as its tokenizer.
		const folder = c.loadHf ?? (c.tokenizer && tokenizerFolder(c.tokenizer));
		const ids = new Set<number>(folder === null ? [] : endIdsOfFolder(folder));
		if (c.dataEndId !== null) ids.add(c.dataEndId);
		// Megatron's generation ends at the end of a document.
		if (c.tokenizerType !== null && tokenizer.endOfDocument !== null) ids.add(tokenizer.endOfDocument);
		const { template } = this.task.chat;
		const ends = {
			chatml: "<|im_end|>",
			jinja: template?.specialTokens.eos_token,
			plain: undefined,
			pretraining: undefined,
		}[c.conversationTemplate];
		if (ends !== undefined) {
			const turnEnd = tokenizer.encodeParts([{ text: ends, markup: true }]);
			if (turnEnd.length === 1) ids.add(turnEnd[0]!);
		}
		return [...ids];
	}
}

function tokenizerFolder(path: string): string {
	return existsSync(join(path, "tokenizer.json")) ? path : dirname(path);
}

/** The end-of-sequence tokens of a Hugging Face model: eos_token_id of generation_config.json and config.json. */
function endIdsOfFolder(path: string): number[] {
	const ids = ["generation_config.json", "config.json"].flatMap((name) => {
		const file = join(path, name);
		if (!existsSync(file)) return [];
		const { eos_token_id: given } = parsePythonJson(readJsonText(file, configLimits, { inside: path }), file);
		return [given].flat().filter((id): id is number => Number.isSafeInteger(id));
	});
	return [...new Set(ids)];
}
