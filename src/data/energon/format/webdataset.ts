/** Reads the `.nv-meta` folder of a prepared WebDataset: its shards and split parts, whose names may be brace patterns. */

import { UserError } from "../../../system/errors.ts";
import { resolvePath, type Storage } from "../storage/storage.ts";
import { INDEX_SQLITE, INFO_JSON, INFO_YAML, META_FOLDER } from "./names.ts";
import { parseYaml, YamlFields, type YamlMap, type YamlValue } from "./python-text.ts";

/** Most names that a pattern may expand to, and most characters of all of them. */
const MOST_EXPANDED = 1_000_000;
const MOST_CHARACTERS = 2 ** 28;
/** Most levels of nested braces. */
const DEEPEST = 32;

/** A part of a pattern: text, alternatives, a range of numbers or letters, or a sequence of parts. */
type Part =
	| string
	| { readonly choices: readonly Part[] }
	| { readonly count: number; readonly at: (index: number) => string; readonly longest: number }
	| { readonly sequence: readonly Part[] };

/** Number of names, and of characters of all of them. */
interface Amount {
	readonly names: number;
	readonly characters: number;
}

/**
 * The names that a pattern expands to, in order: `{000..123}`, `{a,b}`, steps, nesting, backslash escapes. The names are counted
 * first; throws a UserError for too many names and for unbalanced braces.
 */
export function expandBraces(pattern: string): string[] {
	const part = parseSequence(pattern, pattern, 0);
	const { names, characters } = amountOf(part);
	if (!(names <= MOST_EXPANDED && characters <= MOST_CHARACTERS)) {
		throw new UserError(`The shard pattern ${brief(pattern)} has too many names: ${names}, at most ${MOST_EXPANDED}.`);
	}
	return expand(part).map((name) => name.replace(/\\(.)/gs, "$1"));
}

/** The beginning of a long pattern, for messages. */
function brief(pattern: string): string {
	return pattern.length > 200 ? `${pattern.slice(0, 200)}…` : pattern;
}

function parseSequence(text: string, whole: string, depth: number): Part {
	if (depth > DEEPEST) throw new UserError(`The shard pattern ${brief(whole)} has more than ${DEEPEST} nested braces.`);
	const sequence: Part[] = [];
	let open = 0;
	let start = 0;
	for (let i = 0; i < text.length; i++) {
		if (text[i] === "\\") {
			i++;
		} else if (text[i] === "{") {
			if (open++ === 0) {
				sequence.push(text.slice(start, i));
				start = i + 1;
			}
		} else if (text[i] === "}") {
			if (--open < 0) break;
			if (open === 0) {
				sequence.push(parseExpression(text.slice(start, i), whole, depth));
				start = i + 1;
			}
		}
	}
	if (open !== 0) throw new UserError(`The shard pattern ${brief(whole)} has unbalanced braces.`);
	sequence.push(text.slice(start));
	return { sequence };
}

function parseExpression(text: string, whole: string, depth: number): Part {
	const integers = /^(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?$/.exec(text);
	if (integers) return integerRange(integers[1]!, integers[2]!, integers[3]);
	const letters = /^([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?$/.exec(text);
	if (letters) return letterRange(letters[1]!, letters[2]!, letters[3]);
	const items = splitAtCommas(text);
	if (items.length > 1) return { choices: items.map((item) => parseSequence(item, whole, depth + 1)) };
	return { sequence: ["{", parseSequence(text, whole, depth + 1), "}"] };
}

function splitAtCommas(text: string): string[] {
	const items: string[] = [];
	let depth = 0;
	let start = 0;
	for (let i = 0; i < text.length; i++) {
		if (text[i] === "\\") i++;
		else if (text[i] === "{") depth++;
		else if (text[i] === "}") depth--;
		else if (text[i] === "," && depth === 0) {
			items.push(text.slice(start, i));
			start = i + 1;
		}
	}
	items.push(text.slice(start));
	return items;
}

function integerRange(from: string, to: string, step: string | undefined): Part {
	const padded = [from, to].some((bound) => bound !== "0" && bound !== "-0" && /^-?0/.test(bound));
	const width = padded ? Math.max(from.length, to.length) : 0;
	const first = Number(from);
	const last = Number(to);
	const increment = (Number(step ?? 1) || 1) * (first < last ? 1 : -1);
	const count = Math.floor((last - first) / increment) + 1;
	const at = (i: number) => {
		const value = first + i * increment;
		const digits = String(Math.abs(value));
		return value < 0 ? `-${digits.padStart(width - 1, "0")}` : digits.padStart(width, "0");
	};
	return { count, at, longest: Math.max(from.length, to.length) };
}

function letterRange(from: string, to: string, step: string | undefined): Part {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
	const first = alphabet.indexOf(from);
	const last = alphabet.indexOf(to);
	const increment = (Number(step ?? 1) || 1) * (first < last ? 1 : -1);
	const count = Math.floor((last - first) / increment) + 1;
	return { count, at: (i) => alphabet[first + i * increment]!, longest: 1 };
}

function amountOf(part: Part): Amount {
	if (typeof part === "string") return { names: 1, characters: part.length };
	if ("count" in part) return { names: part.count, characters: part.count * part.longest };
	const inner = ("choices" in part ? part.choices : part.sequence).map(amountOf);
	if ("choices" in part) {
		return inner.reduce((a, b) => ({ names: a.names + b.names, characters: a.characters + b.characters }));
	}
	return inner.reduce((a, b) => ({
		names: a.names * b.names,
		characters: a.characters * b.names + b.characters * a.names,
	}));
}

function expand(part: Part): string[] {
	if (typeof part === "string") return [part];
	if ("count" in part) return Array.from({ length: part.count }, (_, i) => part.at(i));
	if ("choices" in part) return part.choices.flatMap(expand);
	let names = [""];
	for (const next of part.sequence) {
		const endings = expand(next);
		names =
			endings.length === 1
				? names.map((name) => name + endings[0])
				: names.flatMap((name) => endings.map((ending) => name + ending));
	}
	return names;
}

interface Numbers {
	/** Text before, between and after the numbers. */
	readonly literals: readonly string[];
	readonly numbers: readonly string[];
}

function tokenize(name: string): Numbers {
	return { literals: name.split(/\d+/), numbers: name.match(/\d+/g) ?? [] };
}

/** Collapses names into patterns in the same order: names that differ in one ascending number of equal width become a range. */
export function collapseBraces(names: readonly string[]): string[] {
	const patterns: string[] = [];
	for (let i = 0; i < names.length; ) {
		const first = tokenize(names[i]!);
		let last = first;
		let slot = -1;
		let end = i + 1;
		for (; end < names.length; end++) {
			const next = tokenize(names[end]!);
			const changed = countingSlot(last, next);
			if (changed < 0 || (slot >= 0 && changed !== slot)) break;
			slot = changed;
			last = next;
		}
		if (slot < 0) {
			patterns.push(names[i]!);
		} else {
			const parts = first.numbers.map((number, k) => (k === slot ? `{${number}..${last.numbers[slot]}}` : number));
			patterns.push(first.literals.map((literal, k) => literal + (parts[k] ?? "")).join(""));
		}
		i = end;
	}
	return patterns;
}

/** Index of the number that is greater by 1 in `next`, with equal width; -1 if the names differ otherwise. */
function countingSlot(previous: Numbers, next: Numbers): number {
	if (previous.numbers.length !== next.numbers.length) return -1;
	if (previous.literals.some((literal, k) => literal !== next.literals[k])) return -1;
	const changed = previous.numbers.flatMap((number, k) => (Number(number) === Number(next.numbers[k]) ? [] : [k]));
	if (changed.length !== 1) return -1;
	const slot = changed[0]!;
	const [before, after] = [previous.numbers[slot]!, next.numbers[slot]!];
	return before.length === after.length && Number(after) === Number(before) + 1 ? slot : -1;
}

export interface Shard {
	/** Relative path, by which the split and the index name the shard. */
	readonly name: string;
	readonly path: string;
	/** Number of samples. */
	readonly count: number;
}

export interface SplitPart {
	/** Shards to read, in order. */
	readonly shards: readonly Shard[];
	/** Excluded samples, as "shard/key". */
	readonly excludes: ReadonlySet<string>;
	/** All shards of the part, with excluded ones; a join index counts them. */
	readonly allShards: readonly string[];
}

type DatasetKind = "webdataset" | "jsonl" | "indexed" | "metadataset" | "filesystem" | "invalid";

/** The kind of data set at a path (docs/spec/energon.md §1.1). */
export function datasetKind(storage: Storage, path: string): DatasetKind {
	if (path.endsWith(".jsonl") || path.endsWith(".yaml")) {
		if (storage.isFile(path)) return path.endsWith(".jsonl") ? "jsonl" : "metadataset";
	}
	if (path.endsWith(".bin") && storage.isFile(path) && storage.isFile(path.replace(/bin$/, "idx"))) return "indexed";
	const meta = (file: string) => storage.isFile(resolvePath(path, `${META_FOLDER}/${file}`));
	if (meta(INFO_JSON) || meta(INFO_YAML)) return "webdataset";
	return meta(INDEX_SQLITE) ? "filesystem" : "invalid";
}

/** Parses a `.yaml` or `.json` file of the metadata folder into a map. */
export function readMap(storage: Storage, path: string): YamlMap {
	const text = storage.readText(path);
	const value = path.endsWith(".json") ? parseJson(text, path) : parseYaml(text, path);
	if (!(value instanceof Map)) throw new UserError(`${path} is not a map.`);
	return value;
}

/** Parses JSON into the maps and lists of parsed YAML. */
function parseJson(text: string, name: string): YamlValue {
	let value: unknown;
	try {
		value = JSON.parse(text);
	} catch (error) {
		throw new UserError(`${name} is not JSON: ${(error as Error).message}.`);
	}
	const convert = (item: unknown): YamlValue => {
		if (Array.isArray(item)) return item.map(convert);
		if (item !== null && typeof item === "object") {
			return new Map(Object.entries(item).map(([key, inner]) => [key, convert(inner)]));
		}
		return item as YamlValue;
	};
	return convert(value);
}

/** Number of samples by shard, in the order of `.info.json`; the position is the shard's number in the indexes. */
export function readShardCounts(storage: Storage, folder: string): Map<string, number> {
	const json = resolvePath(folder, `${META_FOLDER}/${INFO_JSON}`);
	const path = storage.isFile(json) ? json : resolvePath(folder, `${META_FOLDER}/${INFO_YAML}`);
	const fields = YamlFields.of(readMap(storage, path), path);
	fields.get("energon_version");
	const counts = fields.optionalMap("shard_counts");
	if (counts === null) throw new UserError(`${path} has no shard_counts.`);
	fields.end();
	for (const [shard, count] of counts) {
		if (typeof count !== "number" || !Number.isSafeInteger(count) || count < 0) {
			throw new UserError(`${path}: the sample count of ${shard} is ${JSON.stringify(count)}.`);
		}
	}
	return counts as Map<string, number>;
}

interface Splits {
	readonly parts: ReadonlyMap<string, readonly string[]>;
	readonly exclude: readonly string[];
}

/** Reads the split file; without a name `split.yaml`, else `split.json`. */
export function readSplits(storage: Storage, folder: string, name: string | null): { splits: Splits; path: string } {
	let path = resolvePath(folder, `${META_FOLDER}/${name ?? "split.yaml"}`);
	const fallback = resolvePath(folder, `${META_FOLDER}/split.json`);
	if ((name ?? "split.yaml") === "split.yaml" && !storage.isFile(path) && storage.isFile(fallback)) path = fallback;
	const fields = YamlFields.of(readMap(storage, path), path);
	const partFields = fields.optionalMap("split_parts");
	if (partFields === null) throw new UserError(`${path} has no split_parts.`);
	const parts = new YamlFields(partFields, `split_parts of ${path}`);
	const splits: Splits = {
		parts: new Map([...partFields.keys()].map((part) => [part, parts.strings(part)])),
		exclude: fields.get("exclude") == null ? [] : fields.strings("exclude"),
	};
	fields.end();
	return { splits, path };
}

// Brace patterns of shard lists: expansion as bash and Energon do it, and its inverse for files we write.

/** Most names that the patterns of a list may expand to. */
const MOST_NAMES = 10_000_000;

/** The names that the patterns of a list in the file `path` expand to, in order. */
export function expandAll(patterns: readonly string[], path: string): string[] {
	const names: string[] = [];
	for (const pattern of patterns) {
		for (const name of expandIn(path, pattern)) names.push(name);
		if (names.length > MOST_NAMES) throw new UserError(`${path} names more than ${MOST_NAMES} shards in one list.`);
	}
	return names;
}

function expandIn(path: string, pattern: string): string[] {
	try {
		return expandBraces(pattern);
	} catch (error) {
		if (error instanceof UserError) throw new UserError(`${path}: ${error.message}`);
		throw error;
	}
}

/** Shards and exclusions of a split part. */
export function readSplitPart(storage: Storage, folder: string, part: string, splitConfig: string | null): SplitPart {
	const counts = readShardCounts(storage, folder);
	const { splits, path } = readSplits(storage, folder, splitConfig);
	const patterns = splits.parts.get(part);
	if (patterns === undefined) {
		throw new UserError(`${path} has no split part ${part}; it has ${[...splits.parts.keys()].join(", ")}.`);
	}
	const excluded = new Set(expandAll(splits.exclude, path));
	const allShards = expandAll(patterns, path);
	const names = allShards.filter((name) => !excluded.has(name));
	if (names.length === 0) throw new UserError(`The split part ${part} of ${path} has no shards.`);
	const shards = names.map((name) => {
		const count = counts.get(name);
		if (count === undefined) {
			throw new UserError(`The split part ${part} of ${path} names the shard ${name}, which was not prepared.`);
		}
		return { name, path: resolvePath(folder, name), count };
	});
	return { shards, excludes: new Set([...excluded].filter((name) => name.includes("/"))), allShards };
}
