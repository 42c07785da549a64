/** Encodes requests for the model: token ids and images, by the configuration's tokenizer and chat template. */

import { existsSync } from "node:fs";
import { join } from "node:path";
import { parsePythonJson } from "../checkpoint/index.ts";
import { hasEncoder } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { Chat } from "../data/text/chat/chat.ts";
import { byteTokenizer, openTokenizer, type Tokenizer } from "../data/text/tokenizer.ts";
import { taskOf } from "../data/vision-language/from-configuration.ts";
import { decodedAs, type EncodedImage, remarkOf } from "../data/vision-language/pixels.ts";
import { type EncodedPrompt, encodePrompt, promptPieces, textPieces } from "../data/vision-language/prompt.ts";
import { chatOf, type VisionLanguageTask } from "../data/vision-language/task.ts";
import type { Images } from "../native/images.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { configLimits, readJsonText } from "../system/json.ts";
import { conversationOf, fragmentsOf, openImages, type Request } from "./requests.ts";

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
		if (c.tokenizer === null && c.loadHf !== null && !bytes) {
			throw new UserError(
				`${c.loadHf} (load-hf) has no tokenizer.json: --tokenizer names the model's, and --bytes is for a model that reads bytes.`,
			);
		}
		this.tokenizer = c.tokenizer === null ? byteTokenizer : openTokenizer(c.tokenizer);
		if (this.tokenizer.vocabularySize > c.vocabSize) {
			throw new UserError(
				`The tokenizer ${c.tokenizer ?? "of bytes"} has ${this.tokenizer.vocabularySize} tokens, more than --vocab-size ${c.vocabSize}.`,
			);
		}
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
		const pieces =
			request.kind === "conversation"
				? promptPieces(request.name, conversationOf(request, files, system), task, this.#chat)
				: textPieces(fragmentsOf(request), task.imageTags);
		for (const [i, file] of files.entries()) {
			const sentence = remarkOf(file, request.images[i]!);
			if (sentence !== null) this.remark(sentence);
		}
		const decodable = files.map((file) => decodedAs(file, task.imageDecoding ?? "transformers"));
		const prompt = encodePrompt(request.name, pieces, decodable, this.tokenizer, task);
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
		const known = ids.filter((id) => id < this.tokenizer.vocabularySize);
		return known.length === 0 ? "" : this.tokenizer.decode(known);
	}

	#endIds(): number[] {
		const { c, tokenizer } = this;
		const ids = new Set<number>(c.loadHf === null ? [] : endIdsOfFolder(c.loadHf));
		if (c.dataEndId !== null) ids.add(c.dataEndId);
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
