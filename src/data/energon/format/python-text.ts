/** JSON and YAML as Python and Energon read them. */

import { isAlias, isMap, isScalar, isSeq, LineCounter, type Node, parseDocument, Schema } from "yaml";
import { UserError } from "../../../system/errors.ts";
import { measureJson, rawJson } from "../../../system/json.ts";

/*
 * Parses JSON as Python's json.loads does: bytes in UTF-8, UTF-16 or UTF-32, with or without a byte order mark; NaN and
 * infinities; exact integers of any size; floats that are whole numbers.
 */

/** Digits of the shortest integers that a 64-bit float may not represent, or the end of a float that may be a whole number. */
const unlike = /\d{16}|\.0+(?!\d)|\d[eE][-+\d]/;
/** Strings, which are skipped, and Python's NaN and Infinity. */
const stringsAndWords = /"(?:[^"\\]|\\.)*"|-?Infinity|NaN/gs;
/** A number that replaces NaN while the text is parsed; no JSON writer spells a number like this. */
const NAN = "-0.00000000000000000000000000000000000000e-987654321";

/** Most values and levels of a JSON part; a parsed part takes many times the memory of its text. */
const limits = { values: 2 ** 22, depth: 256 } as const;
/** Bytes of a text that cannot exceed the limits. */
const SMALL = 256;

/** A whole number that is a float for Python, such as 2.0 or 1e5. Its text is Python's repr of any float. */
export class PythonFloat extends Number {
	override toString(): string {
		const value = this.valueOf();
		if (!Number.isFinite(value)) return String(value).replace("NaN", "nan").replace("Infinity", "inf");
		const [digits, power] = value.toExponential().split("e") as [string, string];
		if (value !== 0 && (Number(power) < -4 || Number(power) >= 16))
			return `${digits}e${power.replace(/^(.)(.)$/, "$10$2")}`;
		return `${Object.is(value, -0) ? "-0" : value}${Number.isInteger(value) ? ".0" : ""}`;
	}

	toJSON(): unknown {
		return rawJson(this.toString());
	}
}

/** JSON in which bigints and PythonFloats keep their digits. */
export function jsonText(value: unknown): string {
	return JSON.stringify(value, (_, one) => (typeof one === "bigint" ? rawJson(String(one)) : one));
}

/**
 * Whole numbers beyond 2⁵³ become bigints, floats without a fraction PythonFloats. Throws an error with the reason for a text that is not JSON, or is too large.
 */
export function parseJsonBytes(bytes: Uint8Array): unknown {
	const text = decodeJson(bytes);
	if (text.length > SMALL) {
		const { values, depth } = measureJson(Buffer.from(text), limits);
		if (depth > limits.depth) throw new SyntaxError(`It is nested more than ${limits.depth} levels deep`);
		if (values > limits.values) throw new SyntaxError(`It has more than ${limits.values} values`);
	}
	try {
		return unlike.test(text) ? JSON.parse(text, exact) : JSON.parse(text);
	} catch (error) {
		if (!(error instanceof SyntaxError) || !/Infinity|NaN/.test(text) || text.includes(NAN)) throw error;
		// Spaces separate the replacement from adjacent digits.
		const numbers = text.replace(stringsAndWords, (word) => {
			if (word.startsWith('"')) return word;
			return word === "NaN" ? ` ${NAN} ` : ` ${word.replace("Infinity", "1e9999")} `;
		});
		return JSON.parse(numbers, exact);
	}
}

function exact(_: string, value: unknown, context?: { readonly source?: string }): unknown {
	if (typeof value !== "number") return value;
	const source = context?.source ?? "";
	if (source === NAN) return Number.NaN;
	if (/^-?\d+$/.test(source)) return Number.isSafeInteger(value) ? value : BigInt(source);
	return Number.isInteger(value) ? new PythonFloat(value) : value;
}

/** Decodes the bytes in the encoding that Python's json.detect_encoding finds. */
function decodeJson(bytes: Uint8Array): string {
	const [a = 1, b = 1, c = 1, d = 1] = bytes;
	const starts = (...mark: number[]) => mark.every((byte, i) => bytes[i] === byte);
	if (starts(0, 0, 0xfe, 0xff)) return utf32(bytes.subarray(4), false);
	if (starts(0xff, 0xfe, 0, 0)) return utf32(bytes.subarray(4), true);
	if (starts(0xfe, 0xff)) return utf16(bytes.subarray(2), "utf-16be");
	if (starts(0xff, 0xfe)) return utf16(bytes.subarray(2), "utf-16le");
	if (bytes.length >= 4) {
		if (a === 0) return b === 0 ? utf32(bytes, false) : utf16(bytes, "utf-16be");
		if (b === 0) return c === 0 && d === 0 ? utf32(bytes, true) : utf16(bytes, "utf-16le");
	} else if (bytes.length === 2) {
		if (a === 0) return utf16(bytes, "utf-16be");
		if (b === 0) return utf16(bytes, "utf-16le");
	}
	return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
}

function utf16(bytes: Uint8Array, encoding: "utf-16le" | "utf-16be"): string {
	return new TextDecoder(encoding, { fatal: true, ignoreBOM: true }).decode(bytes);
}

function utf32(bytes: Uint8Array, littleEndian: boolean): string {
	if (bytes.length % 4 !== 0) throw new TypeError("The text ends within a character of UTF-32.");
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
	let text = "";
	for (let at = 0; at < bytes.length; at += 4) {
		const code = view.getUint32(at, littleEndian);
		if (code > 0x10ffff) throw new TypeError(`Byte ${at} is not a character of UTF-32.`);
		text += String.fromCodePoint(code);
	}
	return text;
}

/*
 * YAML as Energon reads it (docs/spec/energon.md §1.1): its own rules for plain scalars, no anchors, tags or dates. Maps keep
 * the order of the file.
 */

export type YamlValue = null | boolean | number | string | YamlValue[] | YamlMap;
export type YamlMap = Map<string, YamlValue>;

/** No types but strings: scalars are cast by Energon's rules. Made once, because that takes half as long as parsing. */
const schema = new Schema({ schema: "failsafe" });

/** Parses YAML; `name` is the file, for messages. Throws a UserError that names the line of a mistake. */
export function parseYaml(text: string, name: string): YamlValue {
	const lines = new LineCounter();
	let document: ReturnType<typeof parseDocument>;
	try {
		document = parseDocument(text, { lineCounter: lines, schema, uniqueKeys: true, prettyErrors: false });
	} catch (error) {
		throw new UserError(`${name} cannot be read as YAML: ${(error as Error).message}`);
	}
	const error = document.errors[0];
	if (error) {
		const { line, col } = lines.linePos(error.pos[0]);
		const reason = error.message.startsWith("Maximum call stack") ? "its parts nest too deeply." : error.message;
		throw new UserError(`${name}, line ${line}, column ${col}: ${reason}`);
	}
	if (document.contents === null) throw new UserError(`${name} is empty.`);
	return convert(document.contents as Node, (node) => {
		const line = node.range ? lines.linePos(node.range[0]).line : 1;
		return new UserError(`${name}, line ${line}: anchors and aliases are not used in Energon files.`);
	});
}

function convert(node: Node | null, refuse: (node: Node) => UserError): YamlValue {
	if (node === null) return null;
	if (isAlias(node)) throw refuse(node);
	if (isMap(node)) {
		return new Map(
			node.items.map((pair) => [
				String(isScalar(pair.key) ? (pair.key.source ?? pair.key.value) : pair.key),
				convert(pair.value as Node | null, refuse),
			]),
		);
	}
	if (isSeq(node)) return node.items.map((item) => convert(item as Node, refuse));
	if (isScalar(node)) return node.type === "PLAIN" ? castScalar(String(node.value)) : String(node.value);
	throw refuse(node);
}

/** A plain scalar by Energon's rules. */
function castScalar(text: string): null | boolean | number | string {
	const lower = text.toLowerCase();
	if (lower === "null" || lower === "~" || lower === "") return null;
	if (lower === "true" || lower === "yes") return true;
	if (lower === "false" || lower === "no") return false;
	if (/^[+-]?\d+(?:_\d+)*$/.test(text)) return Number(text.replaceAll("_", ""));
	const isFloat = (text.includes(".") || lower.includes("e")) && /^[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?$/i.test(text);
	return isFloat ? Number(text) : text;
}

/** Reads the fields of a map, and names the fields that are wrong. */
export class YamlFields {
	readonly #used = new Set<string>();

	constructor(
		private readonly map: YamlMap,
		/** File and place, for messages. */
		private readonly where: string,
	) {}

	static of(value: YamlValue | undefined, where: string): YamlFields {
		if (!(value instanceof Map)) throw new UserError(`${where} is not a map.`);
		return new YamlFields(value, where);
	}

	has(name: string): boolean {
		return this.map.has(name);
	}

	/** The value, or undefined; the key counts as known from now on. */
	get(name: string): YamlValue | undefined {
		this.#used.add(name);
		return this.map.get(name);
	}

	string(name: string): string {
		const value = this.get(name);
		if (typeof value !== "string") throw this.wrong(name, "a string");
		return value;
	}

	optionalString(name: string): string | null {
		return this.get(name) == null ? null : this.string(name);
	}

	optionalNumber(name: string): number | null {
		const value = this.get(name);
		if (value == null) return null;
		if (typeof value !== "number") throw this.wrong(name, "a number");
		return value;
	}

	list(name: string): YamlValue[] {
		const value = this.get(name);
		if (!Array.isArray(value)) throw this.wrong(name, "a list");
		return value;
	}

	strings(name: string): string[] {
		return this.list(name).map((item) => {
			if (typeof item === "string") return item;
			// Shard patterns may look like numbers ("000"); the file's own spelling is lost by then.
			throw this.wrong(name, "a list of strings");
		});
	}

	optionalMap(name: string): YamlMap | null {
		const value = this.get(name);
		if (value == null) return null;
		if (!(value instanceof Map)) throw this.wrong(name, "a map");
		return value;
	}

	/** Refuses keys that were not asked for. */
	end(): void {
		for (const key of this.map.keys()) {
			if (!this.#used.has(key)) throw new UserError(`${this.where} has an unknown key: ${key}.`);
		}
	}

	wrong(name: string, what: string): UserError {
		const value = this.map.get(name);
		return new UserError(
			value === undefined ? `${this.where} has no ${name}.` : `${name} in ${this.where} is not ${what}.`,
		);
	}
}

/** Maps and lists as plain objects and arrays. */
export function toPlain(value: YamlValue): unknown {
	if (value instanceof Map) return Object.fromEntries([...value].map(([key, item]) => [key, toPlain(item)]));
	return Array.isArray(value) ? value.map(toPlain) : value;
}
