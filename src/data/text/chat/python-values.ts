/**
 * Values of a rendering as Python has them: data with its kinds of numbers (2.0 and whole numbers of any size), and the text that str,
 * repr and json.dumps make of a value.
 */
import { Environment, type Interpreter } from "@huggingface/jinja";
import { PythonFloat } from "../../energon/format/python-text.ts";

export type Value = ReturnType<Interpreter["evaluate"]>;
type Kind = new (content?: unknown) => Value;

const valueFrom = (data: unknown): Value => new Environment().set("value", data);
/** The library's kinds of values, which it does not export. */
const [TextValue, FlagValue, NoneValue, WholeValue, FloatValue, ListValue, MapValue] = (
	["", true, null, 1, 0.5, [], {}] as const
).map((sample) => valueFrom(sample).constructor as Kind) as [Kind, Kind, Kind, Kind, Kind, Kind, Kind];

/** A value of JSON, with a PythonFloat for a whole number that is a float and a bigint beyond 2⁵³, or a function. */
export function pythonValue(data: unknown): Value {
	if (typeof data === "string") return new TextValue(data);
	if (typeof data === "boolean") return new FlagValue(data);
	if (typeof data === "number") return new (Number.isInteger(data) ? WholeValue : FloatValue)(data);
	if (typeof data === "bigint") return Object.assign(new WholeValue(Number(data)), { toString: () => String(data) });
	if (data === null) return new NoneValue();
	if (data instanceof PythonFloat) return new FloatValue(data.valueOf());
	if (Array.isArray(data)) return new ListValue(data.map(pythonValue));
	if (typeof data !== "object") return valueFrom(data);
	return new MapValue(new Map(Object.entries(data).map(([key, value]) => [key, pythonValue(value)])));
}

export function textValue(text: string): Value {
	return new TextValue(text);
}

/** Python's name of a value's type, for messages. */
export function typeName({ type }: Value): string {
	return types[type] ?? type;
}

const types: Readonly<Record<string, string>> = {
	...{ StringValue: "str", IntegerValue: "int", FloatValue: "float", BooleanValue: "bool", NullValue: "None" },
	...{ ArrayValue: "list", TupleValue: "tuple", ObjectValue: "dict" },
};

/** Python's str. Of a name that is not there, it is empty. */
export function pythonText(value: Value): string {
	if (typeof value.value === "string") return value.value;
	return value.type === "UndefinedValue" ? "" : pythonRepr(value);
}

function pythonRepr(value: Value): string {
	const { type, value: content } = value;
	if (typeof content === "string") return quoted(content);
	if (type === "BooleanValue") return content ? "True" : "False";
	if (type === "NullValue") return "None";
	if (type === "FloatValue") return String(new PythonFloat(content as number));
	if (Array.isArray(content)) {
		const items = (content as Value[]).map(pythonRepr).join(", ");
		return type === "TupleValue" ? `(${items}${content.length === 1 ? "," : ""})` : `[${items}]`;
	}
	if (!(content instanceof Map)) return value.toString();
	const entries = [...(content as Map<string, Value>)];
	return `{${entries.map(([key, item]) => `${quoted(key)}: ${pythonRepr(item)}`).join(", ")}}`;
}

const escapes: Readonly<Record<string, string>> = { "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\" };

/** Python's repr of a text; the marks of a rendering (noncharacters) stay as they are. */
function quoted(text: string): string {
	const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
	const inside = text.replace(/(?! )[\p{C}\p{Z}\\'"]/gu, (character) => {
		if (character === '"' || /[\ufdd0-\ufdef]/.test(character)) return character;
		if (character === "'") return quote === "'" ? "\\'" : "'";
		const code = character.codePointAt(0)!.toString(16);
		const escaped =
			code.length <= 2
				? `\\x${code.padStart(2, "0")}`
				: `\\${code.length <= 4 ? "u" : "U"}${code.padStart(code.length <= 4 ? 4 : 8, "0")}`;
		return escapes[character] ?? escaped;
	});
	return quote + inside + quote;
}

/** The options of transformers' filter tojson; absent: None. */
export interface JsonOptions {
	readonly ensureAscii: boolean;
	readonly indent: number | string | null;
	readonly separators: readonly [item: string, key: string] | null;
	readonly sortKeys: boolean;
}

/** Python's json.dumps. Throws an error for a value that is not of JSON. */
export function pythonJson(value: Value, options: JsonOptions): string {
	const { ensureAscii, indent, sortKeys } = options;
	const [between, colon] = options.separators ?? [indent === null ? ", " : ",", ": "];
	const step = typeof indent === "number" ? " ".repeat(indent) : indent;
	const text = (content: string) => {
		const json = JSON.stringify(content);
		const escaped = (unit: string) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
		return ensureAscii ? json.replace(/[\x7f-\ufdcf\ufdf0-\uffff]/g, escaped) : json;
	};
	const within = (items: readonly string[], [open, close]: string, padding: string) => {
		if (step === null || items.length === 0) return `${open}${items.join(between)}${close}`;
		return `${open}${padding}${step}${items.join(`${between}${padding}${step}`)}${padding}${close}`;
	};
	const written = (one: Value, padding: string): string => {
		const { type, value: content } = one;
		if (typeof content === "string") return text(content);
		if (type === "BooleanValue") return String(content);
		if (type === "NullValue") return "null";
		if (type === "IntegerValue") return one.toString();
		if (type === "FloatValue")
			return Number.isFinite(content) ? String(new PythonFloat(content as number)) : String(content);
		const deeper = padding + (step ?? "");
		if (Array.isArray(content))
			return within(
				(content as Value[]).map((item) => written(item, deeper)),
				"[]",
				padding,
			);
		if (!(content instanceof Map)) throw new Error(`${typeName(one)} cannot be written as JSON`);
		const entries = [...(content as Map<string, Value>)];
		if (sortKeys) entries.sort(([a], [b]) => (a < b ? -1 : 1));
		return within(
			entries.map(([key, item]) => `${text(key)}${colon}${written(item, deeper)}`),
			"{}",
			padding,
		);
	};
	return written(value, "\n");
}
