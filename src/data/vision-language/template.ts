/** Conversations as text: what is written around the turns, and what of it counts in the loss (docs/spec/vision.md §5.5). */
import { UserError } from "../../system/errors.ts";
import { SampleError } from "../energon/errors.ts";
import { type Chat, ChatError, type ChatTurn } from "../text/chat/chat.ts";
import type { CountedPart } from "../text/loss-parts.ts";
import { type Conversation, type Fragment, ownRoles, type Role, type Turn } from "./conversation.ts";

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
 * The pieces of a conversation. `chat`: the template of `jinja`; documents, which nobody says, need none. Throws a
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
export function renderPrompt(
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
		const counts = turn.role === null || roles.includes(turn.role);
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

function checkTurn(key: string, { role, sender, fragments }: Turn, template: TemplateName): void {
	const jinja = "a chat template (--chat-template) may know more";
	if (role !== null && !(ownRoles as readonly string[]).includes(role)) {
		throw new SampleError(
			`Sample ${key} cannot be trained on: its conversation has a turn of ${JSON.stringify(sender.slice(0, 40))}; speakers of ${template} are ${ownRoles.join(", ")}; ${jinja}.`,
			key,
		);
	}
	if (fragments === null) {
		throw new SampleError(
			`Sample ${key} cannot be trained on: its conversation has a turn that calls tools, which ${template} cannot write; ${jinja}.`,
			key,
		);
	}
}
