/**
 * The assistant's text in a rendered conversation, for templates without `{% generation %}` blocks. A turn begins where the
 * rendering of the turns before it with the generation prompt ends, and ends where the rendering up to it does: all that a
 * model writes after the prompt, the end-of-turn token too. Of a prompt for a model that thinks and one for a model that does
 * not, that counts which the turn has. Templates that write the turns of a beginning otherwise (a system prompt before the last
 * question, earlier reasoning left out) have no such prefixes; there the turn's content is looked for, with marks around it
 * that must leave everything else as it was, or the token that ends the turn where it is the last.
 */
import { TemplateError } from "./jinja.ts";
import { marks } from "./template-nodes.ts";

/** Characters [begin, end). */
export interface Span {
	readonly begin: number;
	readonly end: number;
}

export type Message = Readonly<Record<string, unknown>>;
/** Renders some of the messages. `prompt`: with the generation prompt, and these variables. */
export type Write = (messages: readonly Message[], prompt?: Readonly<Record<string, unknown>>) => string;

/**
 * Spans of the turns of the assistant in `text`, what `write` makes of all messages; or the first turn whose place cannot
 * be found. `ends`: tokens that may end a turn.
 */
export function assistantSpans(
	messages: readonly Message[],
	text: string,
	write: Write,
	ends: readonly string[],
): Span[] | { readonly lost: number } {
	const contents = new ContentPlaces(messages, text, write);
	const begins = messages.map((message, turn) =>
		message.role === "assistant"
			? (promptEnd(messages.slice(0, turn), text, write) ?? contents.of(turn)?.begin ?? null)
			: null,
	);
	const spans: Span[] = [];
	for (const [turn, message] of messages.entries()) {
		if (message.role !== "assistant") continue;
		const begin = begins[turn]!;
		if (begin === null) return { lost: turn };
		const last = turn === messages.length - 1;
		const end = last ? text.length : prefix(text, () => write(messages.slice(0, turn + 1)));
		if (end !== null && end >= begin) {
			spans.push({ begin, end: withoutLine(text, begin, end, ends) });
			continue;
		}
		const content = contents.of(turn)?.end ?? -1;
		const next = begins.slice(turn + 1).find((one) => one !== null) ?? text.length;
		// Calls of tools come after the content.
		const own = content >= begin && !Array.isArray(message.tool_calls);
		const found = own
			? withEnd(text, content, ends)
			: tokenEnd(text, begin, next, () => write(messages.slice(0, turn + 1)), ends);
		if (found === null) return { lost: turn };
		spans.push({ begin, end: found });
	}
	return spans;
}

/** Where a turn ends in text [begin, next): behind the first of the tokens with which the turn, written alone, ends; null: it has no such end. */
function tokenEnd(
	text: string,
	begin: number,
	next: number,
	write: () => string,
	ends: readonly string[],
): number | null {
	const alone = written(write)?.trimEnd();
	const token = ends.filter((one) => alone?.endsWith(one)).sort((a, b) => b.length - a.length)[0];
	if (token === undefined) return null;
	let at = text.indexOf(token, begin);
	while (at > 0 && text[at - 1] === marks.dataBegin) at = text.indexOf(token, at + 1);
	return at < 0 || at + token.length > next ? null : at + token.length;
}

/** The names that templates have for whether the model thinks before it answers. */
const withoutThinking = { enable_thinking: false, thinking: false } as const;

/** Where the prompt after some messages ends in `text`; null when no prompt is what `text` has. */
function promptEnd(messages: readonly Message[], text: string, write: Write): number | null {
	const ends = [{}, withoutThinking].map((variables) => prefix(text, () => write(messages, variables)));
	return ends.reduce((longest, end) => (longest === null || (end !== null && end > longest) ? end : longest), null);
}

/** Length of a rendering that `text` begins with; null when it does not, or the template refuses the messages. */
function prefix(text: string, write: () => string): number | null {
	const beginning = written(write);
	return beginning !== null && text.startsWith(beginning) ? beginning.length : null;
}

/** A rendering; null when the template refuses the messages. */
function written(write: () => string): string | null {
	try {
		return write();
	} catch (error) {
		if (error instanceof TemplateError) return null;
		throw error;
	}
}

/** A span without the white space that a template writes after the token that ends a turn. */
function withoutLine(text: string, begin: number, end: number, ends: readonly string[]): number {
	const trimmed = begin + text.slice(begin, end).trimEnd().length;
	return ends.some((token) => text.slice(begin, trimmed).endsWith(token)) ? trimmed : end;
}

/** A span's end with the token after it that ends the turn, where there is one. */
function withEnd(text: string, end: number, ends: readonly string[]): number {
	const [space] = /^\s*/.exec(text.slice(end))!;
	const after = end + space.length;
	const token = ends.filter((one) => text.startsWith(one, after)).sort((a, b) => b.length - a.length)[0];
	return token === undefined ? end : after + token.length;
}

/** Where the contents of the assistant's turns are. */
class ContentPlaces {
	#places: ReadonlyMap<number, Partial<Span>> | null = null;

	constructor(
		private readonly messages: readonly Message[],
		private readonly text: string,
		private readonly write: Write,
	) {}

	of(turn: number): Partial<Span> | undefined {
		this.#places ??= this.#find();
		return this.#places.get(turn);
	}

	/** Renders with marks around the contents; no spans are known when the marks change other text. */
	#find(): ReadonlyMap<number, Partial<Span>> {
		const places = new Map<number, { begin?: number; end?: number }>();
		const marked = written(() => this.write(this.messages.map((message, turn) => withMarks(message, turn))));
		if (marked?.replace(contentMark, "") !== this.text) return places;
		let removed = 0;
		for (const match of marked.matchAll(contentMark)) {
			const turn = Number(match[1]);
			const place = places.get(turn) ?? {};
			const which = match[0].startsWith(marks.contentBegin) ? "begin" : "end";
			place[which] ??= match.index - removed;
			places.set(turn, place);
			removed += match[0].length;
		}
		return places;
	}
}

/** A text with marks around all but the white space at its ends. */
function around(text: string, begin: string, end: string): string {
	const [, before, core, after] = /^(\s*)([\s\S]*?)(\s*)$/.exec(text)!;
	return core === "" ? text : `${before}${begin}${core}${end}${after}`;
}

const contentMark = /[\ufdd5\ufdd6](\d+)[\ufdd5\ufdd6]/g;

/** The names of an assistant's reasoning: that of most templates, that of gpt-oss's, and another in data. */
export const reasoningNames = ["reasoning_content", "thinking", "reasoning"];

/**
 * A turn of the assistant with marks around its text, inside of white space that a template may strip, and before its reasoning,
 * with which a turn begins.
 */
function withMarks(given: Message, turn: number): Message {
	if (given.role !== "assistant") return given;
	const begin = `${marks.contentBegin}${turn}${marks.contentBegin}`;
	const end = `${marks.contentEnd}${turn}${marks.contentEnd}`;
	const message: Record<string, unknown> = { ...given };
	for (const name of reasoningNames)
		if (typeof given[name] === "string") message[name] = around(given[name], begin, "");
	const { content } = message;
	if (typeof content === "string") return { ...message, content: around(content, begin, end) };
	if (!Array.isArray(content)) return message;
	const texts = (content as { type?: string; text?: string }[]).filter(({ type }) => type === "text");
	const [first, last] = [texts[0], texts.at(-1)];
	const marked = (content as { type?: string; text?: string }[]).map((part) => ({
		...part,
		...(part.text === undefined
			? {}
			: { text: `${part === first ? begin : ""}${part.text}${part === last ? end : ""}` }),
	}));
	return { ...message, content: marked };
}
