/** Reading and comparing the reference files of megatron-energon; their README describes them. */
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import type { Keyed } from "../../../src/data/energon/sample.ts";
import { UserError } from "../../../src/system/errors.ts";
import { elementOf } from "./elements.ts";
import type { EnergonRecord, EnergonValue } from "./python-state.ts";
import type { Parameters } from "./setup.ts";

/** [worker, keys, sources, restore key, extra] of one output. */
export type Row = readonly unknown[];

export interface OrderFile {
	readonly dataset: string;
	readonly parameters: Parameters;
	readonly shards: readonly string[];
	readonly subflavors_seen?: Readonly<Record<string, readonly string[]>>;
	readonly ranks: readonly {
		readonly rank: number;
		readonly dataset_len_rank?: number;
		readonly outputs: readonly Row[];
		readonly epoch_ends?: readonly number[];
	}[];
}

export interface RestoredSample {
	readonly restore_key: readonly unknown[];
	readonly restored?: Readonly<Record<string, unknown>>;
	readonly restored_key?: readonly unknown[];
	readonly error?: string;
}

export interface StateFile {
	readonly dataset: string;
	readonly parameters: Parameters;
	readonly restore_parameters: "same" | Partial<Parameters>;
	readonly outputs_before_save: number;
	readonly shards: readonly string[];
	readonly ranks: readonly {
		readonly rank: number;
		readonly state: unknown;
		readonly state_saved_right_after_restore_is_equal: boolean;
		readonly before: readonly Row[];
		readonly epoch_ends_before?: readonly number[];
		readonly next: readonly Row[];
		readonly epoch_ends_next?: readonly number[];
		readonly uninterrupted_next?: readonly Row[];
		readonly epoch_ends_uninterrupted_next?: readonly number[];
		readonly restore_sample?: readonly RestoredSample[];
	}[];
}

/** A file of the reference data, parsed. */
export function readGolden<File>(folder: string, path: string): File {
	const file = join(folder, path);
	try {
		return JSON.parse(readFileSync(file, "utf8")) as File;
	} catch (error) {
		throw new UserError(`${file} cannot be read as JSON: ${(error as Error).message}.`);
	}
}

/** JSON files of a folder, by name; empty if the folder is absent. */
export function goldenFiles(folder: string, name: string): string[] {
	const place = join(folder, name);
	if (!existsSync(place)) return [];
	return readdirSync(place)
		.filter((file) => file.endsWith(".json"))
		.sort()
		.map((file) => `${name}/${file}`);
}

/** Row of an output. `shards` numbers the shards as the file does. */
export function rowOf(item: Keyed, worker: number, golden: string, shards: readonly string[]): Row {
	const element = elementOf(item);
	const sources = element.sources.map(({ datasetPath, shardName, index }) => {
		const dataset = datasetPath.startsWith(`${golden}/`) ? datasetPath.slice(golden.length + 1) : datasetPath;
		return [shards.indexOf(dataset.endsWith(".jsonl") ? dataset : `${dataset}/${shardName}`), index];
	});
	const row: unknown[] = [worker, element.keys, sources, element.restoreKey];
	if (element.extra !== undefined && element.extra !== null) row.push(element.extra);
	return row;
}

/** Deep comparison of JSON-like values: the path and both sides of the first difference, or null. */
export function difference(actual: unknown, expected: unknown, path = ""): string | null {
	if (Object.is(actual, expected) || actual === expected) return null;
	if (Array.isArray(actual) && Array.isArray(expected)) {
		for (let i = 0; i < Math.max(actual.length, expected.length); i++) {
			if (i >= actual.length || i >= expected.length) {
				return `${path} has ${actual.length} entries instead of ${expected.length}`;
			}
			const found = difference(actual[i], expected[i], `${path}[${i}]`);
			if (found !== null) return found;
		}
		return null;
	}
	if (isRecord(actual) && isRecord(expected)) {
		for (const key of new Set([...Object.keys(expected), ...Object.keys(actual)])) {
			const found = difference(actual[key], expected[key], path === "" ? key : `${path}.${key}`);
			if (found !== null) return found;
		}
		return null;
	}
	return `${path === "" ? "value" : path} is ${brief(actual)} instead of ${brief(expected)}`;
}

function isRecord(value: unknown): value is Record<string, unknown> {
	return value !== null && typeof value === "object" && !Array.isArray(value);
}

function brief(value: unknown): string {
	const text = value === undefined ? "absent" : (JSON.stringify(value) ?? String(value));
	return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}

/** First row that differs, with its number, or null. */
export function rowDifference(actual: readonly Row[], expected: readonly Row[], what: string): string | null {
	for (const [i, row] of expected.entries()) {
		const found = difference(actual[i], row, "");
		if (found !== null) return `${what}, output ${i}: ${found}; expected ${brief(row)}, got ${brief(actual[i])}`;
	}
	return actual.length === expected.length ? null : `${what}: ${actual.length} outputs instead of ${expected.length}`;
}

/** Values of a JSON dump as the converter of states takes them: bytes and arrays are themselves again. */
export function revive(value: unknown): EnergonValue {
	if (Array.isArray(value)) return value.map(revive);
	if (!isRecord(value)) return value as EnergonValue;
	if (typeof value.__bytes_b64__ === "string") return new Uint8Array(Buffer.from(value.__bytes_b64__, "base64"));
	if (value.__type__ === "ndarray:uint32") return Uint32Array.from(value.value as number[]);
	return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, revive(item)])) as EnergonRecord;
}

/** Bytes and arrays as plain lists, so that `difference` compares them. */
export function comparable(value: EnergonValue): unknown {
	if (value instanceof Uint8Array) return `bytes:${Buffer.from(value).toString("base64")}`;
	if (value instanceof Uint32Array) return [...value];
	if (Array.isArray(value)) return value.map(comparable);
	if (!isRecord(value)) return value;
	return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, comparable(item as EnergonValue)]));
}
