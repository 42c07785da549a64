/**
 * A Jinja template of a chat, rendered as Hugging Face's transformers does. `{% generation %}` blocks leave marks around
 * what they write. Errors say at which line of the template they are.
 */
import { Environment, Interpreter, parse, tokenize } from "@huggingface/jinja";
import { UserError } from "../../../system/errors.ts";
import { checkNoMarks, marks } from "./marker-characters.ts";

type Program = ReturnType<typeof parse>;
type Tokens = ReturnType<typeof tokenize>;
type Token = Tokens[number];

const whitespace = { trim_blocks: true, lstrip_blocks: true } as const;

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
		throw new Refusal(String(message));
	},
	range: (first: number, end?: number, step = 1) => {
		const [begin, stop] = end === undefined ? [0, first] : [first, end];
		return Array.from({ length: Math.max(0, Math.ceil((stop - begin) / step)) }, (_, i) => begin + i * step);
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
		this.text = text.replace(/\r\n?/g, "\n");
		checkNoMarks(text, file);
		this.hasGeneration = generationBlock.test(text);
		this.#program = this.#parse(this.#tokens());
	}

	/** Throws a TemplateError. */
	render(variables: Readonly<Record<string, unknown>>): string {
		try {
			return run(new Interpreter(environment(variables)), this.#program);
		} catch (error) {
			throw this.#located(error as Error, variables);
		}
	}

	/** The error of a rendering with the line it came from, which rendering again finds. */
	#located(error: Error, variables: Readonly<Record<string, unknown>>): TemplateError {
		const lines = new LineInterpreter(environment(variables));
		let line: number | null = null;
		try {
			run(lines, this.#parse(withLines(this.#tokens(), linesOf(this.text))));
		} catch {
			line = lines.line;
		}
		return new TemplateError(error.message, line, error instanceof Refusal);
	}

	#tokens(): Tokens {
		try {
			return tokenize(withGenerationMarks(this.text), whitespace);
		} catch (error) {
			throw this.#wrong(error as Error, firstBadLine(this.text));
		}
	}

	#parse(tokens: Tokens): Program {
		// The parser does not say which token it fails at: the last it has looked at.
		let last = 0;
		const watched = new Proxy(tokens, {
			get: (target, name, receiver) => {
				const index = typeof name === "string" ? Number(name) : Number.NaN;
				if (index >= 0 && index < target.length) last = Math.max(last, index);
				return Reflect.get(target, name, receiver);
			},
		});
		try {
			return parse(watched);
		} catch (error) {
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
	const text = message.startsWith("undefined is not an object") ? "it ends within a block" : message;
	return `${text.replace(/^Parser Error: /, "").replace(/\.+$/, "")}.`;
}

function environment(variables: Readonly<Record<string, unknown>>): Environment {
	const result = new Environment();
	for (const [name, value] of Object.entries({ ...globals, ...variables })) result.set(name, value);
	return result;
}

function run(interpreter: Interpreter, program: Program): string {
	return interpreter.run(program).value as string;
}

const generationBlock = /\{%-?\s*generation\s*-?%\}/;

/** The tags of generation blocks as blocks that write a mark; they take as much whitespace away as the tags do. */
function withGenerationMarks(text: string): string {
	return text.replace(
		/\{%([-+]?)\s*(end)?generation\s*(-?)%\}/g,
		(_, left: string, end: string | undefined, right: string) => {
			return `{%${left} if true %}${end ? marks.lossEnd : marks.lossBegin}{% endif ${right}%}`;
		},
	);
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

/** Remembers the line of the last statement or expression that it came to. */
class LineInterpreter extends Interpreter {
	line: number | null = null;

	override evaluate(...[statement, scope]: Parameters<Interpreter["evaluate"]>): ReturnType<Interpreter["evaluate"]> {
		const { type, value } = (statement ?? {}) as { type?: string; value?: unknown };
		const line = type === "Comment" ? /^line (\d+)$/.exec(String(value)) : null;
		if (line !== null) this.line = Number(line[1]);
		return super.evaluate(statement, scope);
	}
}

/** How many statements and expressions the first lines of a template begin; null where they end within one. */
function openedBy(lines: readonly string[], count: number): number | null {
	try {
		return tokenize(withGenerationMarks(`${lines.slice(0, count).join("\n")}\n`), whitespace).filter(opens).length;
	} catch {
		return null;
	}
}

/** The line of every statement and expression of a template, from 1, in order. */
function linesOf(text: string): number[] {
	const lines = text.split("\n");
	const result: number[] = [];
	let begin = 1;
	for (let count = 1; count <= lines.length; count++) {
		const opened = openedBy(lines, count);
		if (opened === null) continue;
		while (result.length < opened) result.push(begin);
		begin = count + 1;
	}
	return result;
}

/** The line after the last at which the template can be cut. */
function firstBadLine(text: string): number {
	const lines = text.split("\n");
	let good = 0;
	for (let count = 1; count < lines.length; count++) if (openedBy(lines, count) !== null) good = count;
	return good + 1;
}
