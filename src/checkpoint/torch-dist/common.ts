/**
 * Converts Megatron's common state (docs/spec/checkpoint.md §1.7, §3.6) to JSON and back: arguments, learning-rate schedule,
 * counters and optimizer groups. Instances of Python classes are not written back.
 */

import { existsSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { dtypes, isDtypeTag } from "../dtype.ts";
import type { Json } from "../native/manifest.ts";
import { openTorchFile } from "../pickle/archive.ts";
import { Global, PythonObject, TorchDtype, Tuple } from "../pickle/values.ts";
import { PythonFloat } from "../pickle/writer.ts";
import type { TorchDistFolder } from "./folder.ts";

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

// Reads the common state and the optimizer groups of a torch_dist checkpoint as JSON (docs/spec/checkpoint.md §1.7,
// §3.6).

/** Most chained optimizers of a module; Megatron chains two or three. */
const MOST_CHAINS = 64;

const commonItem = "common_state/shard_0_1";

/** The state in common.pt, which upstream prefers too, else in the byte item; {} without either. */
export function readCommon(folder: TorchDistFolder, inert: readonly string[]): JsonObject {
	const path = join(folder.path, "common.pt");
	let state: Json = {};
	if (existsSync(path)) {
		using file = openTorchFile(path, { inert, inside: folder.path });
		state = jsonOf(file.value, path);
	} else if (folder.objects.has(commonItem)) state = itemJson(folder, commonItem, inert);
	if (!isJsonObject(state)) throw new UserError(`The common state of ${folder.path} is not a dictionary.`);
	return state;
}

function itemJson(folder: TorchDistFolder, name: string, inert: readonly string[]): Json {
	return jsonOf(folder.readObject(name, { inert }), `${folder.path} (${name})`);
}

/** Parameter groups by module, a list for each chained optimizer, without the parameters. */
export function readParameterGroups(
	folder: TorchDistFolder,
	common: JsonObject,
	inert: readonly string[],
): Record<string, JsonObject[][]> {
	const groups = new Map<string, JsonObject[][]>();
	const add = (module: string, chain: number, value: Json | undefined) => {
		if (!Array.isArray(value)) return;
		if (chain > MOST_CHAINS)
			throw new UserError(`${folder.path}: module ${module} has optimizer ${chain}; at most ${MOST_CHAINS} are read.`);
		const chains = groups.get(module) ?? [];
		groups.set(module, chains);
		chains[chain] = value.filter(isJsonObject).map(({ params: _, ...group }) => group);
	};
	for (const name of folder.objects.keys()) {
		const item = /^mimo\.([^.]+)\.optimizer\.mimo\.[^.]+?(?:\.(\d+))?\.param_groups\/shard_0_1$/.exec(name);
		if (item) add(item[1]!, Number(item[2] ?? 0), itemJson(folder, name, inert));
		const buffers = /^(?:mimo\.([^.]+)\.)?(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer\//.exec(
			name,
		);
		if (buffers) {
			const state = itemJson(folder, name, inert);
			if (isJsonObject(state)) add(buffers[1] ?? "language", Number(buffers[2] ?? 0), state.param_groups);
		}
	}
	const plain = common.optimizer;
	if (isJsonObject(plain)) {
		const chains = isJsonObject(plain.optimizer) ? [plain] : Object.values(plain);
		chains.forEach((chain, index) => {
			if (isJsonObject(chain) && isJsonObject(chain.optimizer)) add("language", index, chain.optimizer.param_groups);
		});
	}
	return Object.fromEntries(groups);
}
