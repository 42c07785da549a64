/**
 * JSON that others may have made: bytes, values and depth are bounded before it is parsed, because a parsed value takes up to
 * forty times the memory of its text.
 */
import { UserError } from "./errors.ts";
import { type OpenOptions, readWholeFile } from "./input-file.ts";

export interface JsonLimits {
	readonly bytes: number;
	/** Keys and values, at most. */
	readonly values: number;
	/** Brackets inside each other. */
	readonly depth: number;
}

/** A list of tensors: some twenty values each, so half a million of them. */
export const indexLimits: JsonLimits = { bytes: 2 ** 27, values: 2 ** 23, depth: 128 };
/** A tokenizer: a vocabulary of millions, and as many merges of two. */
export const tokenizerLimits: JsonLimits = { bytes: 2 ** 28, values: 2 ** 24, depth: 64 };
/** A description of a model. */
export const configLimits: JsonLimits = { bytes: 2 ** 24, values: 2 ** 20, depth: 64 };

export interface JsonSize {
	/** Colons outside strings: one a key. */
	readonly keys: number;
	/** Commas, colons and opening brackets outside strings: no fewer than values. */
	readonly values: number;
	readonly depth: number;
}

/** Counts in one pass, without a check of the grammar; ends where `depth` or `values` is passed. */
export function measureJson(json: Uint8Array, { depth: deepest, values: most }: Omit<JsonLimits, "bytes">): JsonSize {
	let [keys, values, depth, largest] = [0, 0, 0, 0];
	let inString = false;
	for (let i = 0; i < json.length && largest <= deepest && values <= most; i++) {
		const byte = json[i];
		if (inString) {
			if (byte === 0x5c) i++;
			else if (byte === 0x22) inString = false;
		} else if (byte === 0x22) inString = true;
		else if (byte === 0x2c) values++;
		else if (byte === 0x3a) {
			keys++;
			values++;
		} else if (byte === 0x7b || byte === 0x5b) {
			values++;
			depth++;
			if (depth > largest) largest = depth;
		} else if (byte === 0x7d || byte === 0x5d) depth--;
	}
	return { keys, values, depth: largest };
}

/** The text of bounded JSON; `path` is for errors. */
export function jsonText(json: Uint8Array, path: string, limits: JsonLimits): string {
	const { values, depth } = measureJson(json, limits);
	if (depth > limits.depth) throw new UserError(`${path} is nested more than ${limits.depth} levels deep.`);
	if (values > limits.values) throw new UserError(`${path} has more than ${limits.values} values.`);
	return Buffer.from(json.buffer, json.byteOffset, json.byteLength).toString("utf8");
}

/** The text of a file of JSON: a regular file within the limits. */
export function readJsonText(path: string, limits: JsonLimits, options: OpenOptions = {}): string {
	return jsonText(readWholeFile(path, limits.bytes, options), path, limits);
}

/** A value that JSON.stringify writes as this text: a number with its digits. */
export function rawJson(text: string): unknown {
	// Standard since 2025, not yet in TypeScript's library.
	return (JSON as unknown as { rawJSON(text: string): unknown }).rawJSON(text);
}
