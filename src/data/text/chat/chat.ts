/**
 * Conversations through a chat template: the text it makes of them, the places of the images, and the parts that an
 * assistant says. The parts that count are found in the text itself, so that a template may strip, move and add text.
 */
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import type { CountedPart } from "../loss-parts.ts";
import { assistantSpans, type Message, reasoningNames, type Span, type Write } from "./assistant-spans.ts";
import { BoundError } from "./bounded-interpreter.ts";
import { JinjaTemplate, TemplateError } from "./jinja.ts";
import type { ChatTemplateText } from "./template-file.ts";
import { DataMarks, marks, withoutMarks } from "./template-nodes.ts";

/** Fields with the reasoning under the names of all templates, as transformers hands them over. */
function withReasoning(fields: Message): Message {
	const reasoning = reasoningNames.map((name) => fields[name]).find((value) => value !== undefined && value !== null);
	return reasoning === undefined ? fields : { thinking: reasoning, ...fields, reasoning_content: reasoning };
}

export interface ChatTurn {
	readonly role: string;
	/** Text and images by their numbers; null: the turn has no content but that of its fields, such as one that only calls tools. */
	readonly content: readonly (string | { readonly image: number })[] | null;
	/** Its other fields, as they are in the data: tool_calls, name, reasoning_content, a content that is null; a weight of 0: it does not count. */
	readonly fields: Readonly<Record<string, unknown>>;
}

/** Text between images, and images by their numbers. */
export type ChatPiece = { readonly parts: readonly CountedPart[] } | { readonly image: number };

/** Why a conversation cannot be written. */
export class ChatError extends Error {}

interface ChatOptions {
	/** Special tokens of the tokenizer; in the data they are text. */
	readonly specialTokens: readonly string[];
	/** Special tokens that the data may write. */
	readonly dataSpecialTokens: readonly string[];
	/** Text for an image, as a template that knows images writes it. */
	readonly imageText: string;
	/** Further variables of the template. */
	readonly variables: Readonly<Record<string, unknown>>;
}

/**
 * Roles that templates compare with, which are handed over as they are even where a tokenizer has a special token of that
 * name. Any other role is text of the data.
 */
const knownRoles = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

export class Chat {
	readonly #template: JinjaTemplate;
	readonly #variables: Readonly<Record<string, unknown>>;
	readonly #ends: readonly string[];
	readonly #data: DataMarks;
	readonly #imageText: string;
	/** Takes content as a list of parts and writes something for an image; must have it so. */
	readonly #typed: { readonly images: boolean; readonly always: boolean };

	/** Throws a UserError for a template that cannot be read, or that takes more than the bounds of a rendering. */
	constructor({ file, text, specialTokens }: ChatTemplateText, options: ChatOptions) {
		this.#template = new JinjaTemplate(text, file);
		this.#variables = { ...specialTokens, ...options.variables };
		this.#ends = [...new Set([...options.specialTokens, ...Object.values(specialTokens)])].filter((end) => end !== "");
		this.#imageText = options.imageText;
		const written = new Set(options.dataSpecialTokens);
		this.#data = new DataMarks([...options.specialTokens, options.imageText].filter((token) => !written.has(token)));
		this.#typed = this.#probe();
	}

	/**
	 * The turns as pieces. `record`: variables of this conversation alone, such as tools. Throws a ChatError that names
	 * the turn for one that the template cannot write.
	 */
	render(turns: readonly ChatTurn[], record: Readonly<Record<string, unknown>> = {}): ChatPiece[] {
		const { messages, write, text } = this.#written(turns, record);
		const counts = turns.filter(({ role }) => role === "assistant").map(({ fields }) => fields.weight !== 0);
		const blocks = text.split(marks.lossBegin).length - 1;
		if (this.#template.hasGeneration && blocks !== counts.length && counts.includes(false)) {
			throw new ChatError(
				`a turn has weight 0, and ${this.#template.file} writes ${counted(blocks, "generation block")} for ${counted(counts.length, "turn")} of the assistant`,
			);
		}
		const spans = this.#template.hasGeneration ? null : assistantSpans(messages, text, write, this.#ends);
		if (spans !== null && "lost" in spans) {
			throw new ChatError(
				`the text of its turn ${spans.lost + 1} cannot be found in what ${this.#template.file} writes`,
			);
		}
		return this.#pieces(text, spans, turns, counts);
	}

	/** The turns up to where the assistant's answer begins; nothing counts. Throws as render does. */
	prompt(turns: readonly ChatTurn[], record: Readonly<Record<string, unknown>> = {}): ChatPiece[] {
		return this.#pieces(this.#written(turns, record, {}).text, [], turns, []);
	}

	/** The template's text. `prompt`: variables with which it asks for an answer; absent: it does not. */
	#written(turns: readonly ChatTurn[], record: Readonly<Record<string, unknown>>, prompt?: Record<string, unknown>) {
		const messages = turns.map((turn) => this.#message(turn));
		const own = { ...this.#variables, ...(this.#data.value(record) as Record<string, unknown>) };
		const write: Write = (some, asked) => {
			try {
				return this.#template.render({
					tools: null,
					documents: null,
					...own,
					...asked,
					messages: some,
					add_generation_prompt: asked !== undefined,
				});
			} catch (error) {
				if (!(error instanceof BoundError)) throw error;
				throw new ChatError(`${this.#template.file} ${error.message}, the bound of a rendering`);
			}
		};
		try {
			return { messages, write, text: write(messages, prompt) };
		} catch (error) {
			if (error instanceof TemplateError) throw this.#refused(error, turns, (count) => write(messages.slice(0, count)));
			throw error;
		}
	}

	/** A turn as templates take it. */
	#message({ role: given, content, fields }: ChatTurn): Message {
		const rest = withReasoning(this.#data.value(fields) as Message);
		const role = knownRoles.includes(given) ? given : this.#data.text(given);
		if (content === null) return { ...rest, role };
		const hasImages = content.some((part) => typeof part !== "string");
		if (!(this.#typed.always || (hasImages && this.#typed.images))) {
			const text = content.map((part) => (typeof part === "string" ? this.#data.text(part) : marks.image)).join("");
			return { ...rest, role, content: text };
		}
		const parts = content.map((part) =>
			typeof part === "string" ? { type: "text", text: this.#data.text(part) } : { type: "image" },
		);
		return { ...rest, role, content: parts };
	}

	/** How the template treats a text, a list of parts, and an image among them. */
	#probe(): { images: boolean; always: boolean } {
		const needle = "mimo-needle";
		const text = { type: "text", text: needle };
		const written = (content: unknown): string | null => {
			try {
				const messages = [{ role: "user", content }];
				return this.#template.render({ ...this.#variables, messages, add_generation_prompt: false });
			} catch (error) {
				if (!(error instanceof BoundError)) return null;
				throw new UserError(`The chat template ${this.#template.file} ${error.message}, the bound of a rendering.`);
			}
		};
		const plain = written(needle);
		const typed = written([text]);
		const takesParts = (typed?.includes(needle) ?? false) && !/["']type["']/.test(typed!);
		const withImage = takesParts ? written([{ type: "image" }, text]) : null;
		return {
			images: (withImage?.includes(needle) ?? false) && withImage !== typed,
			always: takesParts && !(plain?.includes(needle) ?? false),
		};
	}

	/** The error of a conversation, with the first turn that the template does not take. `write`: renders that many turns. */
	#refused(error: TemplateError, turns: readonly ChatTurn[], write: (count: number) => string): ChatError {
		const { file } = this.#template;
		const where = error.line === null ? file : `${file}, line ${error.line},`;
		const turn = turns.findIndex((_, i) => {
			try {
				write(i + 1);
				return false;
			} catch (other) {
				return (other as Error).message === error.message;
			}
		});
		const which = turn < 0 ? "it" : `its turn ${turn + 1} (${turns[turn]!.role.slice(0, 40)})`;
		const message = withoutMarks(error.message);
		const date = message.includes("not a function") && /strftime_now/.test(this.#template.text);
		const hint = date ? "; a template that asks for the date needs --chat-template-date" : "";
		return error.refusal
			? new ChatError(`${where} refuses ${which}: ${JSON.stringify(message)}`)
			: new ChatError(`${where} fails at ${which}: ${message.replace(/\.$/, "")}${hint}`);
	}

	/**
	 * Rendered text as pieces. `turnSpans`: the assistant's turns; null: they are between the template's own marks. `counts`: which of
	 * them count; all that follow do.
	 */
	#pieces(
		text: string,
		turnSpans: readonly Span[] | null,
		turns: readonly ChatTurn[],
		counts: readonly boolean[],
	): ChatPiece[] {
		const spans = turnSpans?.filter((_, i) => counts[i] !== false) ?? null;
		const images = turns.flatMap(({ content }) =>
			(content ?? []).flatMap((part) => (typeof part === "string" ? [] : [part.image])),
		);
		const pieces: ChatPiece[] = [];
		let parts: CountedPart[] = [];
		const end = () => {
			if (parts.length > 0) pieces.push({ parts });
			parts = [];
		};
		let [found, generating, block] = [0, false, 0];
		const image = RegExp.escape(this.#imageText);
		const special = new RegExp(
			`(\\ufdd0[^\\ufdd0-\\ufdd6]*\\ufdd1)|([\\ufdd0\\ufdd1])|([\\ufdd3\\ufdd4])|(\\ufdd2|${image})`,
			"g",
		);
		let at = 0;
		for (const match of text.matchAll(special)) {
			add(at, match.index, true);
			at = match.index + match[0].length;
			if (match[1] !== undefined) add(match.index + 1, at - 1, false);
			else if (match[3] !== undefined) generating = match[3] === marks.lossBegin && counts[block++] !== false;
			else if (match[4] !== undefined) {
				end();
				const number = images[found++];
				if (number !== undefined) pieces.push({ image: number });
			}
		}
		add(at, text.length, true);
		end();
		if (found !== images.length) {
			throw new ChatError(
				`${this.#template.file} writes ${counted(found, "image placeholder")} (${this.#imageText}) for its ${counted(images.length, "image")}`,
			);
		}
		return pieces;

		/** Adds characters [from, to), cut where spans begin and end. */
		function add(from: number, to: number, markup: boolean): void {
			const borders = (spans ?? []).flatMap(({ begin, end: last }) => [begin, last]);
			const cuts = [from, ...borders.filter((border) => border > from && border < to), to];
			for (let i = 0; i + 1 < cuts.length; i++) {
				const [first, last] = [cuts[i]!, cuts[i + 1]!];
				if (first === last) continue;
				const loss = spans === null ? generating : spans.some((span) => span.begin <= first && last <= span.end);
				parts.push({ text: text.slice(first, last), markup, loss });
			}
		}
	}
}
