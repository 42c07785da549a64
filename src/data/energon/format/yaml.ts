/**
 * YAML as Energon reads it (docs/spec/energon.md §1.1): its own rules for plain scalars, no anchors, tags or dates.
 * Maps keep the order of the file.
 */
import { isAlias, isMap, isScalar, isSeq, LineCounter, type Node, parseDocument, Schema } from "yaml";
import { UserError } from "../../../system/errors.ts";

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
