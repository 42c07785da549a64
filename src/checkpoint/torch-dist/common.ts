/**
 * Converts Megatron's common state (docs/spec/checkpoint.md §1.7, §3.6) to JSON and back: arguments, learning-rate schedule,
 * counters and optimizer groups. Instances of Python classes are not written back.
 */
import { UserError } from "../../system/errors.ts";
import { dtypes, isDtypeTag } from "../dtype.ts";
import type { Json } from "../native/manifest.ts";
import { Global, PythonObject, TorchDtype, Tuple } from "../pickle/values.ts";
import { PythonFloat } from "../pickle/writer.ts";

/** Most values of a state: shared references could make the JSON of a small pickle huge. */
const LARGEST_STATE = 2_000_000;
const DEEPEST_STATE = 64;

export type JsonObject = { readonly [key: string]: Json };

/**
 * The JSON of a Python value: tuples become lists, dtypes their names, instances of a class `{"__class__": …}`. `where`: the
 * file or item that the error about a too large value names.
 */
export function jsonOf(value: unknown, where: string): Json {
	let nodes = 0;
	/** Keys and indices from the root to the current value. */
	const path: string[] = [];
	const at = (key: string, item: unknown): Json => {
		path.push(key);
		const json = visit(item);
		path.pop();
		return json;
	};
	const list = (items: Iterable<unknown>): Json => Array.from(items, (item, i) => at(String(i), item));
	const visit = (entry: unknown): Json => {
		if (++nodes > LARGEST_STATE || path.length > DEEPEST_STATE) {
			const key = path.slice(0, 3).join(".") || "the object itself";
			throw new UserError(
				`${where}: ${key} has more than ${DEEPEST_STATE} levels, or the object more than ${LARGEST_STATE} values.`,
			);
		}
		if (entry === null || typeof entry === "boolean" || typeof entry === "string") return entry;
		if (typeof entry === "number") return Number.isFinite(entry) ? entry : { __float__: String(entry) };
		if (typeof entry === "bigint") return entry.toString();
		if (entry instanceof TorchDtype) return `torch.${dtypes[entry.tag].torch}`;
		if (entry instanceof Tuple) return list(entry.items);
		if (Array.isArray(entry) || entry instanceof Set) return list(entry);
		if (entry instanceof Map) return object(entry);
		if (entry instanceof PythonObject) {
			if (/^(argparse|types)\./.test(String(entry.type)) && entry.state instanceof Map) return object(entry.state);
			return { __class__: String(entry.type), args: list(entry.args) };
		}
		return { __class__: (entry as object).constructor?.name ?? "unknown" };
	};
	const object = (entries: ReadonlyMap<unknown, unknown>): Json =>
		Object.fromEntries(
			Array.from(entries, ([key, item]) => {
				const name =
					typeof key === "string" || typeof key === "number" ? String(key) : JSON.stringify(at("a key", key));
				return [name, at(name, item)];
			}),
		);
	return visit(value);
}

/** The Python value of JSON; undefined for an instance of a class, whose key is then left out. */
export function pythonOf(value: Json): unknown {
	if (typeof value === "string") {
		const tag = Object.entries(dtypes).find(([, { torch }]) => value === `torch.${torch}`)?.[0];
		return isDtypeTag(tag) ? new TorchDtype(tag) : value;
	}
	if (Array.isArray(value)) {
		const items = value.map(pythonOf);
		return items.includes(undefined) ? undefined : items;
	}
	if (typeof value !== "object" || value === null) return value;
	const entries = value as JsonObject;
	if (typeof entries.__float__ === "string") return new PythonFloat(Number(entries.__float__));
	if (entries.__class__ !== undefined) return undefined;
	return pythonMap(entries);
}

export function pythonMap(entries: JsonObject): Map<string, unknown> {
	return new Map(
		Object.entries(entries)
			.map(([key, entry]) => [key, pythonOf(entry)] as const)
			.filter(([, entry]) => entry !== undefined),
	);
}

/** argparse's Namespace with these attributes. */
export function namespace(attributes: JsonObject): PythonObject {
	const object = new PythonObject(new Global("argparse", "Namespace"), []);
	object.state = pythonMap(attributes);
	return object;
}

export function isJsonObject(value: Json | undefined): value is JsonObject {
	return typeof value === "object" && value !== null && !Array.isArray(value);
}
