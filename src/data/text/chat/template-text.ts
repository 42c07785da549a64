/**
 * The text of a Jinja template as tokens, and the lines of its parts, which the library's tokens do not have. All of it takes
 * time in proportion to the text.
 */
import { tokenize } from "@huggingface/jinja";
import { marks } from "./marker-characters.ts";

export type Tokens = ReturnType<typeof tokenize>;
type Token = Tokens[number];

/** Characters of the longest template; published ones have up to 30,000. */
export const LONGEST_TEMPLATE = 2 ** 18;

const whitespace = { trim_blocks: true, lstrip_blocks: true } as const;

export function tokensOf(text: string): Tokens {
	return tokenize(new Source(withGenerationMarks(text)) as unknown as string, whitespace);
}

/** The tags of generation blocks as blocks that write a mark; they take as much whitespace away as the tags do. */
function withGenerationMarks(text: string): string {
	return text.replace(
		/\{%([-+]?)\s*(end)?generation\s*(-?)%\}/g,
		(_, left: string, end: string | undefined, right: string) => {
			return `{%${left} if true %}${end ? marks.lossEnd : marks.lossBegin}{% endif ${right}%}`;
		},
	);
}

/**
 * A text as the library's tokenizer prepares it, without the last step. That step takes out the tags of generation blocks, which
 * this text does not have, and its time grows with the square of the longest run of blanks.
 */
class Source {
	constructor(
		private readonly text: string,
		/** What the tokenizer reads, made from the prepared text. */
		private readonly read: (text: string) => string = (prepared) => prepared,
		/** Leaves line ends where they are. */
		private readonly keepsLines = false,
	) {}

	endsWith(end: string): boolean {
		return !this.keepsLines && this.text.endsWith(end);
	}

	slice(begin: number, end: number): Source {
		return new Source(this.text.slice(begin, end), this.read, this.keepsLines);
	}

	replace(pattern: RegExp, by: string): Source | string {
		if (pattern.source.includes("generation")) return this.read(this.text);
		return this.keepsLines ? this : new Source(this.text.replace(pattern, by), this.read);
	}
}

/** The line at which the tokenizer fails; a tag that does not end is at the line where it begins. */
export function badLine(text: string): number {
	const marked = withGenerationMarks(text);
	let last = 0;
	const watched = (prepared: string) =>
		new Proxy(Object(prepared), {
			get: (target, name) => {
				const index = typeof name === "string" ? Number(name) : Number.NaN;
				if (index >= 0) last = index;
				const value = Reflect.get(target, name) as unknown;
				return typeof value === "function" ? value.bind(prepared) : value;
			},
		}) as string;
	try {
		tokenize(new Source(marked, watched, true) as unknown as string, whitespace);
	} catch (error) {
		if (!/end of/.test((error as Error).message)) return marked.slice(0, last + 1).split("\n").length;
	}
	return tagsOf(marked).at(-1)?.line ?? 1;
}

/** The line of every statement and expression of a template, from 1, in order. */
export function linesOf(text: string): number[] {
	return tagsOf(withGenerationMarks(text)).flatMap(({ line, comment }) => (comment ? [] : [line]));
}

export const opens = ({ type }: Token) => type === "OpenStatement" || type === "OpenExpression";

/** The tokens, and before each statement and expression a comment with its line. */
export function withLines(tokens: Tokens, lines: readonly number[]): Tokens {
	let opened = 0;
	return tokens.flatMap((token) => {
		if (!opens(token)) return [token];
		return [{ value: `line ${lines[opened++]}`, type: "Comment" } as Token, token];
	});
}

interface Tag {
	readonly line: number;
	readonly comment: boolean;
}

const outside = /\n|\{#[\s\S]*?(?:#\}|$)|\{[%{]/g;
const inside =
	/\n|\{#[\s\S]*?(?:#\}|$)|'(?:[^'\\]|\\[\s\S])*(?:'|$)|"(?:[^"\\]|\\[\s\S])*(?:"|$)|-\}\}|\{[%{]|[%}]\}|[{}]/g;

/** Where the tags of a text begin, by the rules of the library's tokenizer. */
function tagsOf(text: string): Tag[] {
	const tags: Tag[] = [];
	let [line, within, braces, at] = [1, false, 0, 0];
	for (;;) {
		const pattern = within ? inside : outside;
		pattern.lastIndex = at;
		const [found] = pattern.exec(text) ?? [];
		if (found === undefined) return tags;
		at = pattern.lastIndex;
		const comment = found.startsWith("{#");
		if (comment || found === "{%" || found === "{{") {
			tags.push({ line, comment });
			within = !comment;
			if (found === "{{") braces = 0;
		} else if (found === "%}" || found === "-}}" || (found === "}}" && braces <= 0)) within = false;
		else if (found === "{") braces++;
		else if (found.startsWith("}")) {
			braces--;
			// Of two, the first alone closes a mapping.
			at -= found.length - 1;
		}
		for (let end = found.indexOf("\n"); end >= 0; end = found.indexOf("\n", end + 1)) line++;
	}
}
