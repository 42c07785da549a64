/**
 * The interpreter of @huggingface/jinja with bounds. Templates come with models of others, and a loop in one would hold up or
 * fill the process that renders it. Steps and characters are counted inside the interpreter and not watched from outside: a
 * template then has the same verdict on every machine and under every load, no rendering waits for a message from another
 * thread, and a thread's memory, for which JavaScriptCore has no limit, stays within what was counted.
 *
 * A step is a node of the template that is evaluated, and what the library does beside it that takes as long. A character is
 * one that an operation reads or writes, or stands for that much of a list. Operations that may make more than they are given
 * are charged before they run.
 */
import { type Environment, Interpreter, type parse } from "@huggingface/jinja";
import {
	type JsonOptions,
	pythonJson,
	pythonText,
	pythonValue,
	textValue,
	typeName,
	type Value,
} from "./python-values.ts";
import { annotate, type Node, Use } from "./template-nodes.ts";

type Program = ReturnType<typeof parse>;

/**
 * The limits of a rendering: some seconds, and some 300 MB. Published templates take 25 to 75 steps a turn, and read and write
 * its characters four or five times.
 */
const bounds = {
	steps: 5_000_000,
	characters: 2 ** 27,
	/** Nodes within each other, through macros too. */
	levels: 1000,
	/** Elements of the loops that are within each other. */
	looped: 250_000,
} as const;

/** A template takes more than its bounds. The message goes on a sentence that begins with the template's name. */
export class BoundError extends Error {}

/** Characters that stand for a new element of a list or mapping. */
const ELEMENT = 32;
/** The longest that JSON makes of a character: \u0000. */
const ESCAPED = 6;

export class BoundedInterpreter extends Interpreter {
	#steps = 0;
	#characters = 0;
	#level = 0;
	/** Level of the innermost loop. */
	#loopLevel = 0;
	#looped = 0;

	/** The text that a program writes with variables, beside which it has `range`. Throws a BoundError. */
	render(program: Program, variables: Readonly<Record<string, unknown>>): string {
		const range = (...numbers: unknown[]) => this.#range(...(numbers as [unknown]));
		for (const name in variables) this.global.setVariable(name, pythonValue(variables[name]));
		if (!("range" in variables)) this.global.set("range", range);
		annotate(program as unknown as Node);
		return this.run(program).value as string;
	}

	override evaluate(statement: Parameters<Interpreter["evaluate"]>[0], environment: Environment): Value {
		const node = statement as Node | undefined;
		if (node === undefined) return super.evaluate(statement, environment);
		if (node instanceof Known) return node.value;
		const level = ++this.#level;
		this.#checkLevel(level);
		// Names are looked up through the scopes of all levels.
		this.#step(node.steps! + (level >> 4));
		const use = node.use!;
		const value = use & Use.counted ? this.#counted(node, environment) : super.evaluate(statement, environment);
		this.#level = level - 1;
		// A name that is not there costs an exception.
		if (value.type === "UndefinedValue") this.#step(15);
		return use === 0 ? value : this.#used(value, use);
	}

	/** Python's range. */
	#range(first: unknown, end?: unknown, step: unknown = 1): number[] {
		const [begin, stop] = end === undefined ? [0, first] : [first, end];
		const [from, to, by] = [begin, stop, step].map((number) =>
			Number.isSafeInteger(number) ? Number(number) : Number.NaN,
		);
		if (by === 0) throw new Error("the step of range() is 0");
		const length = Math.max(0, Math.ceil((to! - from!) / by!));
		if (Number.isNaN(length)) throw new Error("range() takes whole numbers");
		this.#charge(length * ELEMENT);
		return Array.from({ length }, (_, i) => from! + i * by!);
	}

	#checkLevel(level: number): void {
		if (level > bounds.levels) throw new BoundError(`nests more than ${shown(bounds.levels)} levels`);
	}

	#step(count: number): void {
		this.#steps += count;
		if (!(this.#steps <= bounds.steps)) {
			throw new BoundError(`takes more than ${shown(bounds.steps)} steps`);
		}
	}

	#charge(characters: number): void {
		this.#characters += characters;
		if (!(this.#characters <= bounds.characters)) {
			throw new BoundError(`reads and writes more than ${shown(bounds.characters)} characters`);
		}
	}

	/** Charges a value for what is done with it. */
	#used(value: Value, use: number): Value {
		const { type, value: content } = value;
		if (typeof content === "string") {
			this.#charge(content.length * ((use & Use.made) + (use & Use.read ? 1 : 0) + (use & Use.whole ? 1 : 0)));
		} else if (typeof content === "object" && content !== null) {
			if (use & Use.made) this.#charge(sizeOf(value) * ELEMENT);
			if (use & Use.read) this.#charge(sizeOf(value));
			if (use & Use.whole) this.#wholly(value);
		}
		if (use & Use.text && typeof content !== "string") return textValue(pythonText(value));
		// Values keep the table of their methods, some kilobytes, once it is looked at: here a copy does.
		return use & Use.object && (type === "StringValue" || type === "ObjectValue") ? copyOf(value, content) : value;
	}

	/**
	 * Charges all text in a value, as often as it is written out. Returns the number of elements at each level; those of a
	 * list are at level 1.
	 */
	#wholly(value: Value): number[] {
		const elements: number[] = [];
		const visit = (one: Value, level: number) => {
			this.#checkLevel(level);
			elements[level] = (elements[level] ?? 0) + 1;
			if (typeof one.value === "string") this.#charge(one.value.length * (level === 0 ? 1 : ESCAPED));
			else if (Array.isArray(one.value)) {
				this.#charge(one.value.length * 8);
				for (const item of one.value as Value[]) visit(item, level + 1);
			} else if (one.value instanceof Map) {
				for (const [key, item] of one.value as Map<string, Value>) {
					this.#charge(8 + key.length * ESCAPED);
					visit(item, level + 1);
				}
			}
		};
		visit(value, 0);
		return elements;
	}

	/** The value of a node whose parts are evaluated first, charged by them, and handed over by their values. */
	#counted(node: Node, environment: Environment): Value {
		switch (node.type) {
			case "BinaryExpression":
				return this.#binary(node, environment);
			case "For":
				return this.#loop(node, environment);
			case "Break":
			case "Continue":
				// Their exceptions pass over the ends of the levels up to the loop.
				this.#level = this.#loopLevel;
				return this.#run(node, environment);
			case "CallExpression":
				return this.#call(node, environment);
			case "MemberExpression": {
				const object = this.#known(node.object!, environment);
				// A text is cut into its characters first.
				this.#charge(sizeOf(object.value) * 8);
				return this.#run({ ...node, object }, environment);
			}
			default:
				return this.#filter(node, environment);
		}
	}

	#run(node: Node, environment: Environment): Value {
		return super.evaluate(node as never, environment);
	}

	#known(node: Node, environment: Environment): Known {
		return new Known(this.evaluate(node as never, environment));
	}

	#binary(node: Node, environment: Environment): Value {
		const left = this.#known(node.left!, environment);
		const right = this.#known(node.right!, environment);
		const { value: operator } = node.operator!;
		const [a, b] = [left.value.value, right.value.value];
		if (operator === "in" || operator === "not in") {
			if (Array.isArray(b)) this.#wholly(right.value);
			else this.#search(left.value, right.value);
		} else if (typeof a === "string" && typeof b === "string") {
			this.#charge(a.length + b.length);
			return textValue(a + b);
		} else if (operator === "+" && Array.isArray(a) && Array.isArray(b)) {
			this.#charge((a.length + b.length) * 8);
		} else {
			this.#wholly(left.value);
			this.#wholly(right.value);
			if (operator === "~") return textValue(pythonText(left.value) + pythonText(right.value));
			// The library writes the other out, as JavaScript does.
			if (operator === "+" && (typeof a === "string" || typeof b === "string")) {
				throw new Error(`${typeName(left.value)} and ${typeName(right.value)} cannot be added`);
			}
		}
		return this.#run({ ...node, left, right }, environment);
	}

	/** Every element of a loop gets a scope of its own before the first is used. */
	#loop(node: Node, environment: Environment): Value {
		const iterable = node.iterable!;
		const selects = iterable.type === "SelectExpression";
		const known = this.#known(selects ? iterable.lhs! : iterable, environment);
		const count = sizeOf(known.value);
		this.#step(count * 8);
		this.#looped += count;
		if (this.#looped > bounds.looped) {
			throw new BoundError(`loops over more than ${shown(bounds.looped)} elements`);
		}
		const outer = this.#loopLevel;
		this.#loopLevel = this.#level;
		const value = this.#run({ ...node, iterable: selects ? { ...iterable, lhs: known } : known }, environment);
		this.#loopLevel = outer;
		this.#looped -= count;
		return value;
	}

	#call(node: Node, environment: Environment): Value {
		const args = node.args!.map((part) => this.#argument(part, environment));
		const callee = node.callee!;
		const object = this.#known(callee.object!, environment);
		const property = callee.computed ? this.#known(callee.property!, environment) : callee.property!;
		const name = property instanceof Known ? property.value.value : property.value;
		this.#grow(String(name), object.value, args);
		const text = object.value.value;
		const characters = args[0] instanceof Known ? args[0].value.value : null;
		if (typeof text === "string" && typeof characters === "string" && isStrip(name)) {
			return copyOf(object.value, stripped(text, name, characters));
		}
		// The method is looked up in the object without being charged again.
		const method = this.#run({ ...callee, object, property }, environment);
		return this.#run({ ...node, args, callee: new Known(method) }, environment);
	}

	#filter(node: Node, environment: Environment): Value {
		const filter = node.filter!;
		const operand = this.#known(node.operand ?? blockOf(node.body!), environment);
		const name = String((filter.callee ?? filter).value);
		const args = filter.args?.map((part) => this.#argument(part, environment)) ?? [];
		this.#grow(name, operand.value, args);
		if (name === "tojson") return textValue(pythonJson(operand.value, jsonOptions(args)));
		if (name === "string") return textValue(pythonText(operand.value));
		if (name === "trim" && operand.value.type !== "StringValue") return textValue(pythonText(operand.value).trim());
		// The arguments of selectattr and rejectattr have to be texts in the template.
		const given = filter.args === undefined || name.endsWith("attr") ? filter : { ...filter, args };
		const items = name === "join" && Array.isArray(operand.value.value) ? (operand.value.value as Value[]) : null;
		const texts =
			items &&
			new Known(
				copyOf(
					operand.value,
					items.map((item) => textValue(pythonText(item))),
				),
			);
		return this.#run({ type: "FilterExpression", operand: texts ?? operand, filter: given }, environment);
	}

	/** An argument of a call with its value. */
	#argument(part: Node, environment: Environment): Node {
		if (part.type === "KeywordArgumentExpression") {
			return { ...part, value: this.#known(part.value as Node, environment) };
		}
		if (part.type === "SpreadExpression" || part.type === "KeywordSpreadExpression") {
			return { ...part, argument: this.#known(part.argument!, environment) };
		}
		return this.#known(part, environment);
	}

	/** A search in a text compares with all of what it looks for, at worst. */
	#search(what: Value | undefined, text: Value): void {
		this.#charge(sizeOf(text) * (1 + ((what === undefined ? 0 : sizeOf(what)) >> 6)));
	}

	/** Charges a filter or method for what it reads and makes beyond its operand. */
	#grow(name: string, operand: Value, args: readonly Node[]): void {
		const values = args.flatMap(valuesOf);
		for (const value of values) this.#wholly(value);
		const lengths = values.flatMap(textsIn).map((text) => text.length);
		const written = lengths.reduce((sum, length) => sum + length, 0);
		const number = values.reduce((most, { value }) => (typeof value === "number" ? Math.max(most, value) : most), 0);
		const { value: text } = operand;
		const size = sizeOf(operand);
		if (typeof text !== "string") {
			if (["tojson", "string", "join"].includes(name)) {
				for (const [level, count] of this.#wholly(operand).entries()) {
					this.#charge(count * (ELEMENT + written + number * level));
				}
			} else if (name === "sort" || name === "dictsort") {
				const before = this.#characters;
				this.#wholly(operand);
				this.#charge((this.#characters - before) * Math.ceil(Math.log2(size + 1)));
			} else if (name === "unique") this.#wholly(operand);
			else this.#charge(size * (1 + written));
			return;
		}
		const what = typeof values[0]?.value === "string" ? values[0].value : null;
		if (name === "replace" || name === "split") this.#search(values[0], operand);
		if (name === "replace") this.#charge(occurrences(text, what ?? "") * (ELEMENT + (lengths[1] ?? 0)));
		else if (name === "split") this.#charge(occurrences(text, what) * ELEMENT * 4);
		else if (name === "indent") this.#charge((occurrences(text, "\n") + 1) * Math.max(4, number));
		else if (name === "join") this.#charge(size * (8 + written));
		else if (name === "tojson") this.#charge(size * ESCAPED);
	}
}

/** A part whose value is known. */
class Known implements Node {
	readonly type = "Known";
	constructor(readonly value: Value) {}
}

const strips = ["strip", "lstrip", "rstrip"] as const;

function isStrip(name: unknown): name is (typeof strips)[number] {
	return strips.includes(name as (typeof strips)[number]);
}

/** Python's strip of these characters, which the library takes for one of whitespace. */
function stripped(text: string, name: (typeof strips)[number], characters: string): string {
	const off = new Set(characters);
	const every = [...text];
	const begin = name === "rstrip" ? 0 : every.findIndex((character) => !off.has(character));
	const end = name === "lstrip" ? every.length : every.findLastIndex((character) => !off.has(character)) + 1;
	return begin < 0 ? "" : every.slice(begin, end).join("");
}

/** The statements of a block as a node. */
function blockOf(body: readonly Node[]): Node {
	return { type: "Program", body, steps: 1, use: 0 };
}

/** The arguments of transformers' tojson, by their order or names. */
function jsonOptions(args: readonly Node[]): JsonOptions {
	const names = ["ensure_ascii", "indent", "separators", "sort_keys"];
	const given: Record<string, unknown> = {};
	for (const [at, part] of args.entries()) {
		const named = part.type === "KeywordArgumentExpression";
		const name = named ? String((part as unknown as { key: Node }).key.value) : (names[at] ?? String(at));
		if (!names.includes(name)) throw new Error(`tojson has no argument ${name}`);
		given[name] = valuesOf(part)[0]?.value;
	}
	const separators = given.separators as readonly Value[] | undefined;
	return {
		ensureAscii: Boolean(given.ensure_ascii),
		indent: (given.indent as number | string | undefined) ?? null,
		separators: separators ? [pythonText(separators[0]!), pythonText(separators[1]!)] : null,
		sortKeys: Boolean(given.sort_keys),
	};
}

/** The values that an argument with its value stands for. */
function valuesOf(part: Node): readonly Value[] {
	if (part instanceof Known) return [part.value];
	if (part.type === "KeywordArgumentExpression") return [(part.value as Known).value];
	const { value } = (part.argument as Known).value;
	if (Array.isArray(value)) return value as Value[];
	return value instanceof Map ? [...(value as Map<string, Value>).values()] : [];
}

/** A text, or the texts of a list. */
function textsIn({ value }: Value): string[] {
	const values = Array.isArray(value) ? (value as Value[]).map((item) => item.value) : [value];
	return values.filter((item) => typeof item === "string");
}

/** Characters of a text, elements of a list or mapping; else 0. */
function sizeOf({ value }: Value): number {
	if (typeof value === "string" || Array.isArray(value)) return value.length;
	return value instanceof Map ? value.size : 0;
}

/** Another value of the same kind. */
function copyOf(value: Value, content: unknown): Value {
	return new (value.constructor as new (content: unknown) => Value)(content);
}

/** How often a text is found in another; null: the number of its words. An empty text is found before and after every character. */
function occurrences(text: string, what: string | null): number {
	if (what === "") return text.length + 1;
	let count = 0;
	if (what === null) for (const _ of text.matchAll(/\S+/g)) count++;
	else for (let at = text.indexOf(what); at >= 0; at = text.indexOf(what, at + what.length)) count++;
	return count;
}

function shown(number: number): string {
	return number.toLocaleString("en");
}
