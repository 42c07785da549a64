/** Conversations as text: what is written around the turns, and what of it counts in the loss (spec vision 5.5). */
import type { TextPart } from "../text/tokenizer.ts";
import type { Conversation, Fragment, Role, Turn } from "./conversation.ts";

/**
 * plain: the turns' contents, a line each. pretraining: "sender: content" lines. chatml: <|im_start|>role … <|im_end|>,
 * as Nemotron and Qwen have it.
 */
export const templateNames = ["plain", "pretraining", "chatml"] as const;
export type TemplateName = (typeof templateNames)[number];

/**
 * A run of text whose tokens all count in the loss or all do not, or an image with the tags around it.
 * Of the text, markup is what the template writes: special tokens in the data's own text are text.
 */
export type Piece =
	| { readonly parts: readonly TextPart[]; readonly loss: boolean }
	| { readonly image: number; readonly before: string; readonly after: string; readonly loss: boolean };

export interface TemplateOptions {
	readonly template: TemplateName;
	/** Whose turns count in the loss; null: the template's own choice. */
	readonly lossRoles: readonly Role[] | null;
	/** Written before and after every image. */
	readonly imageTags: readonly [before: string, after: string];
}

/** What is around a turn: `open` never counts, `close` counts as the turn does, `after` never. */
interface Frame {
	readonly open: string;
	readonly close: string;
	readonly after: string;
}

function frameOf(template: TemplateName, { role, sender }: Turn, last: boolean): Frame {
	const line = last ? "" : "\n";
	if (role === null || template === "plain") return { open: "", close: line, after: "" };
	if (template === "pretraining") return { open: `${sender}: `, close: line, after: "" };
	return { open: `<|im_start|>${role}\n`, close: "<|im_end|>", after: "\n" };
}

/** The pieces of a conversation, neighbours of one kind joined: they are tokenised together. */
export function render({ turns }: Conversation, options: TemplateOptions): Piece[] {
	const { template, imageTags } = options;
	const roles = options.lossRoles ?? (template === "chatml" ? ["assistant"] : ["system", "user", "assistant"]);
	const pieces: Piece[] = [];
	const add = (text: string, markup: boolean, loss: boolean) => {
		const before = pieces.at(-1);
		if (text === "") return;
		const part = { text, markup };
		if (before && "parts" in before && before.loss === loss) {
			pieces[pieces.length - 1] = { parts: [...before.parts, part], loss };
		} else {
			pieces.push({ parts: [part], loss });
		}
	};
	for (const [index, turn] of turns.entries()) {
		const counts = turn.role === null || roles.includes(turn.role);
		const { open, close, after } = frameOf(template, turn, index === turns.length - 1);
		// "sender: " is part of what a pretrained model says.
		add(open, template === "chatml", counts && template === "pretraining");
		for (const fragment of turn.fragments) addFragment(fragment, counts);
		add(close, true, counts);
		add(after, true, false);
	}
	return pieces;

	function addFragment(fragment: Fragment, counts: boolean): void {
		if (typeof fragment === "string") add(fragment, false, counts);
		else pieces.push({ ...fragment, before: imageTags[0], after: imageTags[1], loss: counts });
	}
}
