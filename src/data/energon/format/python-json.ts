/**
 * Parses JSON as Python's json.loads does: bytes in UTF-8, UTF-16 or UTF-32, with or without a byte order mark; NaN and
 * infinities; exact integers of any size.
 */
import { measureJson } from "../../../system/json.ts";

/** Digits of the shortest integers that a 64-bit float may not represent. */
const long = /\d{16}/;
/** Strings, which are skipped, and Python's NaN and Infinity. */
const stringsAndWords = /"(?:[^"\\]|\\.)*"|-?Infinity|NaN/gs;
/** A number that replaces NaN while the text is parsed; no JSON writer spells a number like this. */
const NAN = "-0.00000000000000000000000000000000000000e-987654321";

/** Most values and levels of a JSON part; a parsed part takes many times the memory of its text. */
const limits = { values: 2 ** 22, depth: 256 } as const;
/** Bytes of a text that cannot exceed the limits. */
const SMALL = 256;

/**
 * Whole numbers beyond 2⁵³ become bigints. Throws an error with the reason for a text that is not JSON, or is too large.
 */
export function parseJsonBytes(bytes: Uint8Array): unknown {
	const text = decodeJson(bytes);
	if (text.length > SMALL) {
		const { values, depth } = measureJson(Buffer.from(text), limits);
		if (depth > limits.depth) throw new SyntaxError(`It is nested more than ${limits.depth} levels deep`);
		if (values > limits.values) throw new SyntaxError(`It has more than ${limits.values} values`);
	}
	try {
		return long.test(text) ? JSON.parse(text, exact) : JSON.parse(text);
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
	return Number.isSafeInteger(value) || !/^-?\d+$/.test(source) ? value : BigInt(source);
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
