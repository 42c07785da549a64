/**
 * A Jinja template of a chat, rendered as Hugging Face's transformers does. `{% generation %}` blocks leave marks around
 * what they write. Errors say at which line of the template they are.
 */
import { Environment, parse } from "@huggingface/jinja";
import { UserError } from "../../../system/errors.ts";
import { BoundError, BoundedInterpreter } from "./bounded-interpreter.ts";
import { checkNoMarks } from "./marker-characters.ts";
import { badLine, LONGEST_TEMPLATE, linesOf, opens, type Tokens, tokensOf, withLines } from "./template-text.ts";

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
