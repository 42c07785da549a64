/**
 * Prompts of a model: a conversation up to where the assistant speaks, a text, or a held-out sample up to the first token
 * that counts, as token ids and images. The pieces of a conversation come from the template that training renders; only
 * promptPieces knows how.
 */
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { SampleError } from "../energon/errors.ts";
import type { Microbatch } from "../microbatch.ts";
import { type Chat, ChatError, type ChatTurn } from "../text/chat/chat.ts";
import type { CountedPart } from "../text/loss-parts.ts";
import type { TextPart, Tokenizer } from "../text/tokenizer.ts";
import { type Conversation, callsTools, type Fragment, ownRoles, type Role, type Turn } from "./conversation.ts";
import { type EncodedText, type EncodingOptions, ignored } from "./encoding.ts";
import { planImages, planRows } from "./image-plan.ts";
import type { DecodableImage } from "./pixels.ts";

/** Stands for the answer while a template is rendered: a code point that is assigned to no character. */
const answer = "\u{10fffe}";

/** The pieces of a conversation, up to where the assistant's answer begins. Throws a UserError for turns that the template does not know. */
export function promptPieces(
	name: string,
	conversation: Conversation,
	options: TemplateOptions,
	chat: Chat | null,
): Piece[] {
	if (options.template === "jinja") return renderPrompt(name, conversation, options, chat!);
	const turns = [...conversation.turns, { role: "assistant", sender: "assistant", fragments: [answer] } as const];
	const pieces: Piece[] = [];
	for (const piece of renderRequest(name, { ...conversation, turns }, options)) {
		if (!("parts" in piece)) {
			pieces.push(piece);
			continue;
		}
		const at = piece.parts.findIndex(({ text }) => text.includes(answer));
		if (at < 0) {
			pieces.push(piece);
			continue;
		}
		const cut = piece.parts[at]!;
		const last = { ...cut, text: cut.text.slice(0, cut.text.indexOf(answer)) };
		const parts = [...piece.parts.slice(0, at), last].filter((part) => part.text !== "");
		if (parts.length > 0) pieces.push({ ...piece, parts });
		return pieces;
	}
	throw new UserError("The chat template leaves out what the assistant says: it cannot ask for an answer.");
}

/** As `render`, with the errors of a request. */
function renderRequest(name: string, conversation: Conversation, options: TemplateOptions): Piece[] {
	try {
		return render(name, conversation, options);
	} catch (error) {
		if (!(error instanceof SampleError)) throw error;
		const sample = `Sample ${name} cannot be trained on: `;
		throw new UserError(error.message.replace(sample, () => `${name} cannot be continued: `));
	}
}

/**
 * The token before a sample: that of data-begin-id, else the tokenizer's own before text around which no template of
 * conversations writes tokens. `turns`: absent for a text that goes on as it is.
 */
export function beginOf(
	{ beginId, template }: Pick<EncodingOptions, "beginId"> & Pick<TemplateOptions, "template">,
	tokenizer: Pick<Tokenizer, "beginOfText">,
	turns: readonly Turn[] = [],
): number | null {
	const asText = template === "plain" || template === "pretraining" || turns.every(({ role }) => role === null);
	return beginId ?? (asText ? tokenizer.beginOfText : null);
}

/** The pieces of a text with images in it and without a speaker. */
export function textPieces(fragments: readonly Fragment[], imageTags: TemplateOptions["imageTags"]): Piece[] {
	return fragments.map((fragment) =>
		typeof fragment === "string"
			? { parts: [{ text: fragment, markup: true, loss: false }] }
			: { ...fragment, before: imageTags[0], after: imageTags[1], loss: false },
	);
}

/** Text with images at its `<image>` tags; images without a tag come first, a line each. */
export function withImages(text: string, images: number): Fragment[] | string {
	const tag = "<image>";
	const tags = text.split(tag).length - 1;
	if (tags > images) return `it has ${counted(tags, `${tag} tag`)} and ${counted(images, "image")}`;
	let image = 0;
	return (`${tag}\n`.repeat(images - tags) + text)
		.split(tag)
		.flatMap((part, index): Fragment[] => (index === 0 ? [part] : [{ image: image++ }, part]))
		.filter((fragment) => fragment !== "");
}

export interface EncodedPrompt {
	readonly ids: Int32Array;
	readonly images: EncodedText["images"];
}

/** Ids and images of a prompt's pieces; `name`: what messages call it. Throws a UserError for text with the image token. */
export function encodePrompt(
	name: string,
	pieces: readonly Piece[],
	images: readonly DecodableImage[],
	tokenizer: Tokenizer,
	options: Pick<EncodingOptions, "sequenceLength" | "imageTokenId" | "beginId" | "sizing" | "tower">,
): EncodedPrompt {
	const { imageTokenId, tower } = options;
	const tokens = (parts: readonly TextPart[]): number[] => {
		const ids = tokenizer.encodeParts(parts);
		if (images.length > 0 && ids.includes(imageTokenId)) {
			throw new UserError(`${name} has the image token ${imageTokenId} in its text.`);
		}
		return [...ids];
	};
	const tag = (text: string) => (text === "" ? [] : tokens([{ text, markup: true }]));
	/** Text before an image, or at the end, with the tags around. */
	const runs = pieces.map((piece) =>
		"parts" in piece
			? { before: tokens(piece.parts), image: null, after: [] }
			: { before: tag(piece.before), image: piece.image, after: tag(piece.after) },
	);
	const text = runs.reduce((sum, { before, after }) => sum + before.length + after.length, 0);
	// As training sizes images: some tokens stay free.
	const plans = planImages(images, options.sequenceLength - text - 4, options.sizing, tower);
	const ids = runs.flatMap(({ before, image, after }) => {
		const rows = image === null ? 0 : planRows(plans[image]!, tower);
		return [...before, ...new Array<number>(rows).fill(imageTokenId), ...after];
	});
	const all = options.beginId === null ? ids : [options.beginId, ...ids];
	return { ids: Int32Array.from(all), images: images.map((image, index) => ({ ...image, plan: plans[index]! })) };
}

interface CaptionPrompts {
	readonly prompts: Microbatch;
	/** Ids that follow each sequence, up to `endId`. */
	readonly truths: readonly (readonly number[])[];
}

/** Cuts the sequences of a microbatch, a sample each, before the first run of tokens that count; a damaged one has none. */
export function captionPrompts({ ids, labels, lengths, positions }: Microbatch, endId: number): CaptionPrompts {
	const kept: number[] = [];
	const truths: number[][] = [];
	let begin = 0;
	const cut = lengths.map((length) => {
		const own = labels.subarray(begin, begin + length);
		const first = own.findIndex((label) => label !== ignored);
		const end = own.findIndex((label, i) => i >= first && (label === ignored || label === endId));
		truths.push(first === -1 ? [] : [...own.subarray(first, end === -1 ? length : end)]);
		const asked = first === -1 ? length : first + 1;
		for (let token = begin; token < begin + asked; token++) kept.push(token);
		begin += length;
		return asked;
	});
	const axes =
		positions &&
		Int32Array.from({ length: (positions.length / ids.length) * kept.length }, (_, at) => {
			const axis = Math.floor(at / kept.length);
			return positions[axis * ids.length + kept[at % kept.length]!]!;
		});
	return {
		prompts: {
			ids: Int32Array.from(kept, (token) => ids[token]!),
			labels: new Int32Array(kept.length).fill(ignored),
			lossMask: new Float32Array(kept.length),
			lengths: cut,
			...(axes && { positions: axes }),
		},
		truths,
	};
}

// Conversations as text: what is written around the turns, and what of it counts in the loss (docs/spec/vision.md §5.5).

/**
 * plain: the turns' contents, a line each. pretraining: "sender: content" lines. chatml: <|im_start|>role … <|im_end|>,
 * as Nemotron and Qwen have it. jinja: a chat template of Hugging Face.
 */
export type TemplateName = "plain" | "pretraining" | "chatml" | "jinja";

/**
 * A run of text that is tokenised as a whole, or an image with the tags around it.
 * Of the text, markup is what the template writes: special tokens in the data's own text are text.
 */
export type Piece =
	| { readonly parts: readonly CountedPart[] }
	| { readonly image: number; readonly before: string; readonly after: string; readonly loss: boolean };

export interface TemplateOptions {
	readonly template: TemplateName;
	/** Whose turns count in the loss; null: the template's own choice. */
	readonly lossRoles: readonly Role[] | null;
	/** Written before and after every image. */
	readonly imageTags: readonly [before: string, after: string];
	/** Special tokens that samples may write; absent: none. */
	readonly dataSpecialTokens?: readonly string[];
}

/**
 * The pieces of a conversation. `chat`: the template of `jinja`; documents have no turns and need none. Throws a
 * SampleError for turns that the template does not know.
 */
export function render(
	key: string,
	conversation: Conversation,
	options: TemplateOptions,
	chat: Chat | null = null,
): Piece[] {
	const { turns, variables } = conversation;
	if (options.template !== "jinja" || turns.every(({ role }) => role === null)) {
		return renderOwn(key, turns, options);
	}
	const [before, after] = options.imageTags;
	try {
		const pieces = chat!.render(turns.map(chatTurn), variables);
		return pieces.map((piece) => ("parts" in piece ? piece : { ...piece, before, after, loss: false }));
	} catch (error) {
		if (!(error instanceof ChatError)) throw error;
		throw new SampleError(`Sample ${key} cannot be trained on: ${error.message}.`, key);
	}
}

/**
 * A request's conversation up to where the assistant's answer begins, through a chat template. Throws a UserError that names
 * request and template for turns that the template does not know.
 */
function renderPrompt(
	name: string,
	{ turns, variables }: Conversation,
	{ imageTags: [before, after] }: Pick<TemplateOptions, "imageTags">,
	chat: Chat,
): Piece[] {
	try {
		const pieces = chat.prompt(turns.map(chatTurn), variables);
		return pieces.map((piece) => ("parts" in piece ? piece : { ...piece, before, after, loss: false }));
	} catch (error) {
		if (!(error instanceof ChatError)) throw error;
		throw new UserError(`${name} cannot be continued: ${error.message}.`);
	}
}

function chatTurn({ role, fragments, fields }: Turn): ChatTurn {
	return { role: role ?? "user", content: fragments, fields: fields ?? {} };
}

/** The markup around a turn. `open` never counts in the loss, `close` counts as the turn does, `after` never counts. */
interface Frame {
	readonly open: string;
	readonly close: string;
	readonly after: string;
}

function frameOf(template: TemplateName, { role, sender }: Turn, last: boolean): Frame {
	const line = last ? "" : "\n";
	if (role === null || template === "plain" || template === "jinja") return { open: "", close: line, after: "" };
	if (template === "pretraining") return { open: `${sender}: `, close: line, after: "" };
	return { open: `<|im_start|>${role}\n`, close: "<|im_end|>", after: "\n" };
}

/** By a template of this program's own. Neighbours that count alike are tokenised together, others apart. */
function renderOwn(key: string, turns: readonly Turn[], options: TemplateOptions): Piece[] {
	const { template, imageTags } = options;
	const roles: readonly string[] = options.lossRoles ?? (template === "chatml" ? ["assistant"] : ownRoles);
	const pieces: Piece[] = [];
	const add = (text: string, markup: boolean, loss: boolean) => {
		const before = pieces.at(-1);
		if (text === "") return;
		const part = { text, markup, loss };
		if (before && "parts" in before && before.parts[0]!.loss === loss) {
			pieces[pieces.length - 1] = { parts: [...before.parts, part] };
		} else {
			pieces.push({ parts: [part] });
		}
	};
	for (const [index, turn] of turns.entries()) {
		checkTurn(key, turn, template);
		const counts = turn.role === null || (roles.includes(turn.role) && turn.fields?.weight !== 0);
		const { open, close, after } = frameOf(template, turn, index === turns.length - 1);
		// "sender: " is part of what a pretrained model says.
		add(open, template === "chatml", counts && template === "pretraining");
		for (const fragment of turn.fragments ?? []) addFragment(fragment, counts);
		add(close, true, counts);
		add(after, true, false);
	}
	return pieces;

	function addFragment(fragment: Fragment, counts: boolean): void {
		if (typeof fragment === "string") {
			const written = options.dataSpecialTokens ?? [];
			for (const text of splitAt(fragment, written)) add(text, written.includes(text), counts);
		} else pieces.push({ ...fragment, before: imageTags[0], after: imageTags[1], loss: counts });
	}
}

/** A text cut before and after every one of the tokens. */
function splitAt(text: string, tokens: readonly string[]): string[] {
	if (tokens.length === 0) return [text];
	return text.split(new RegExp(`(${tokens.map((token) => RegExp.escape(token)).join("|")})`));
}

function checkTurn(key: string, turn: Turn, template: TemplateName): void {
	const { role, sender } = turn;
	const jinja = "a chat template (--chat-template) may know more";
	if (role !== null && !(ownRoles as readonly string[]).includes(role)) {
		throw new SampleError(
			`Sample ${key} cannot be trained on: its conversation has a turn of ${JSON.stringify(sender.slice(0, 40))}; speakers of ${template} are ${ownRoles.join(", ")}; ${jinja}.`,
			key,
		);
	}
	if (callsTools(turn)) {
		throw new SampleError(
			`Sample ${key} cannot be trained on: its conversation has a turn that calls tools, which ${template} cannot write; ${jinja}.`,
			key,
		);
	}
}
