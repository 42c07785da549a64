/**
 * A Jinja template of a chat, rendered as Hugging Face's transformers does. `{% generation %}` blocks leave marks around
 * what they write. Errors say at which line of the template they are.
 */
import { Environment, parse, tokenize } from "@huggingface/jinja";
import { UserError } from "../../../system/errors.ts";
import { BoundError, BoundedInterpreter } from "./bounded-interpreter.ts";
import { checkNoMarks, marks } from "./template-nodes.ts";

/*
 * The text of a Jinja template as tokens, and the lines of its parts, which the library's tokens do not have. All of it takes
 * time in proportion to the text.
 */

type Tokens = ReturnType<typeof tokenize>;
type Token = Tokens[number];

/** Characters of the longest template; published ones have up to 30,000. */
const LONGEST_TEMPLATE = 2 ** 18;

const whitespace = { trim_blocks: true, lstrip_blocks: true } as const;

function tokensOf(text: string): Tokens {
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
		/** The tokenizer's input, made from the prepared text. */
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
function badLine(text: string): number {
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

const opens = ({ type }: Token) => type === "OpenStatement" || type === "OpenExpression";

/** The tokens, and before each statement and expression a comment with its line. */
function withLines(tokens: Tokens, lines: readonly number[]): Tokens {
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

type Program = ReturnType<typeof parse>;

/** A template that has failed on a conversation. */
export class TemplateError extends Error {
	constructor(
		message: string,
		/** From 1; null where it is not known. */
		readonly line: number | null,
		/** The template itself refuses the conversation (raise_exception). */
		readonly refusal: boolean,
	) {
		super(message);
	}
}

class Refusal extends Error {}

/** Names that every template of transformers may use. */
const globals: Readonly<Record<string, unknown>> = {
	true: true,
	false: false,
	none: null,
	True: true,
	False: false,
	None: null,
	raise_exception: (message: unknown) => {
		throw new Refusal(typeof message === "object" ? "no text" : String(message));
	},
};

export class JinjaTemplate {
	/** Its lines end as Jinja's do. */
	readonly text: string;
	readonly #program: Program;
	/** Whether `{% generation %}` blocks say what an assistant writes. */
	readonly hasGeneration: boolean;

	/** `file`: for messages. Throws a UserError that names file and line for a text that is not a template. */
	constructor(
		text: string,
		readonly file: string,
	) {
		if (text.length > LONGEST_TEMPLATE) {
			throw new UserError(
				`The chat template ${file} has ${text.length} characters; at most ${LONGEST_TEMPLATE} are read.`,
			);
		}
		this.text = text.replace(/\r\n?/g, "\n");
		checkNoMarks(text, file);
		this.hasGeneration = generationBlock.test(text);
		this.#program = this.#parse(this.#tokens());
	}

	/** Throws a TemplateError, or a BoundError for one that takes more than the bounds of a rendering. */
	render(variables: Readonly<Record<string, unknown>>): string {
		try {
			return new BoundedInterpreter(new Environment()).render(this.#program, { ...globals, ...variables });
		} catch (error) {
			if (error instanceof BoundError) throw error;
			throw this.#located(error as Error, variables);
		}
	}

	/** The error of a rendering with the line it came from, which rendering again finds. */
	#located(error: Error, variables: Readonly<Record<string, unknown>>): TemplateError {
		const lines = new LineInterpreter(new Environment());
		let line: number | null = null;
		try {
			lines.render(this.#parse(withLines(this.#tokens(), linesOf(this.text))), { ...globals, ...variables });
		} catch {
			line = lines.line;
		}
		return new TemplateError(error.message, line, error instanceof Refusal);
	}

	#tokens(): Tokens {
		try {
			return tokensOf(this.text);
		} catch (error) {
			throw this.#wrong(error as Error, badLine(this.text));
		}
	}

	#parse(tokens: Tokens): Program {
		// The parser does not say which token it fails at: the last it has looked at.
		let last = 0;
		try {
			return parse(tokens);
		} catch (error) {
			const watched = new Proxy(tokens, {
				get: (target, name, receiver) => {
					const index = typeof name === "string" ? Number(name) : Number.NaN;
					if (index >= 0 && index < target.length) last = Math.max(last, index);
					return Reflect.get(target, name, receiver);
				},
			});
			try {
				parse(watched);
			} catch {
				// Fails as before.
			}
			const opened = tokens.slice(0, last + 1).filter(opens).length;
			throw this.#wrong(error as Error, linesOf(this.text)[Math.max(0, opened - 1)] ?? null);
		}
	}

	#wrong({ message }: Error, line: number | null): UserError {
		const where = line === null ? "" : `, line ${line}`;
		return new UserError(`The chat template ${this.file}${where} cannot be read: ${sentence(message)}`);
	}
}

/** A message of the Jinja library as the end of a sentence. */
function sentence(message: string): string {
	if (message.startsWith("undefined is not an object")) return "it ends within a block.";
	if (message.startsWith("Maximum call stack")) return "its parts nest too deeply.";
	return `${message.replace(/^Parser Error: /, "").replace(/\.+$/, "")}.`;
}

const generationBlock = /\{%-?\s*generation\s*-?%\}/;

/** Remembers the line of the last statement or expression that it came to. */
class LineInterpreter extends BoundedInterpreter {
	line: number | null = null;

	override evaluate(
		...[statement, scope]: Parameters<BoundedInterpreter["evaluate"]>
	): ReturnType<BoundedInterpreter["evaluate"]> {
		const { type, value } = (statement ?? {}) as { type?: string; value?: unknown };
		const line = type === "Comment" ? /^line (\d+)$/.exec(String(value)) : null;
		if (line !== null) this.line = Number(line[1]);
		return super.evaluate(statement, scope);
	}
}
