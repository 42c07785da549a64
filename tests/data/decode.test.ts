/** JSON parts as Python reads them, and bounds of what parts become. */
import { describe, expect, test } from "bun:test";
import { gzipSync } from "node:zlib";
import { decodePart, LARGEST_TEXT_PART } from "../../src/data/energon/format/media.ts";
import { PythonFloat, parseJsonBytes } from "../../src/data/energon/format/python-text.ts";

const parse = (text: string) => parseJsonBytes(Buffer.from(text));

describe("JSON as Python reads it", () => {
	test("NaN and infinities are numbers, and text in strings", () => {
		expect(parse('[NaN, Infinity, -Infinity, "NaN, \\"Infinity", {"NaN": 1}]')).toEqual([
			Number.NaN,
			Number.POSITIVE_INFINITY,
			Number.NEGATIVE_INFINITY,
			'NaN, "Infinity',
			{ NaN: 1 },
		]);
	});

	for (const wrong of [
		"NaNNaN",
		"1NaN",
		"3Infinity",
		"Infinity5",
		"-NaN",
		"{NaN: 1}",
		"+Infinity",
		"nan",
		"[1,]",
		"-0.0e",
	]) {
		test(`${wrong} is refused`, () => expect(() => parse(wrong)).toThrow(SyntaxError));
	}

	test("whole numbers are exact, beyond 2^53 as bigints, and floats where Python reads them so", () => {
		const text = '[9007199254740991, 9007199254740993, -12345678901234567890, "12345678901234567890", 0.1, -0, 1e400]';
		const large = [9007199254740991, 9007199254740993n, -12345678901234567890n, "12345678901234567890"];
		expect(parse(text)).toEqual([...large, 0.1, -0, Number.POSITIVE_INFINITY]);
		const floats = parse("[1e20, 2.0, -0.0, 15e1, 0.0e9]") as PythonFloat[];
		expect(floats.every((value) => value instanceof PythonFloat)).toBe(true);
		expect(floats.map(Number)).toEqual([1e20, 2, -0, 150, 0]);
		expect([floats.join(), JSON.stringify(floats)]).toEqual(["1e+20,2.0,-0.0,150.0,0.0", "[1e+20,2.0,-0.0,150.0,0.0]"]);
	});

	const text = '{"a": "ü€𝄞", "b": NaN}';
	const expected = { a: "ü€𝄞", b: Number.NaN };
	const utf16 = (little: boolean) => {
		const bytes = Buffer.from(text, "utf16le");
		return little ? bytes : bytes.swap16();
	};
	const utf32 = (little: boolean) => {
		const codes = [...text].map((letter) => letter.codePointAt(0)!);
		const bytes = Buffer.alloc(4 * codes.length);
		for (const [i, code] of codes.entries())
			little ? bytes.writeUInt32LE(code, 4 * i) : bytes.writeUInt32BE(code, 4 * i);
		return bytes;
	};
	const mark = (...bytes: number[]) => Buffer.from(bytes);
	for (const [name, bytes] of [
		["UTF-8", Buffer.from(text)],
		["UTF-8 with a mark", Buffer.concat([mark(0xef, 0xbb, 0xbf), Buffer.from(text)])],
		["UTF-16 LE", utf16(true)],
		["UTF-16 LE with a mark", Buffer.concat([mark(0xff, 0xfe), utf16(true)])],
		["UTF-16 BE", utf16(false)],
		["UTF-16 BE with a mark", Buffer.concat([mark(0xfe, 0xff), utf16(false)])],
		["UTF-32 LE", utf32(true)],
		["UTF-32 LE with a mark", Buffer.concat([mark(0xff, 0xfe, 0, 0), utf32(true)])],
		["UTF-32 BE", utf32(false)],
		["UTF-32 BE with a mark", Buffer.concat([mark(0, 0, 0xfe, 0xff), utf32(false)])],
	] as const) {
		test(name, () => expect(parseJsonBytes(bytes)).toEqual(expected));
	}

	test("two bytes of UTF-16", () => {
		expect(parseJsonBytes(Buffer.from("7", "utf16le"))).toBe(7);
		expect(parseJsonBytes(Buffer.from("7", "utf16le").swap16())).toBe(7);
	});

	test("text of an unknown encoding is refused", () => expect(() => parseJsonBytes(mark(0x22, 0xff, 0x22))).toThrow());
});

describe("parts", () => {
	const options = { images: null };

	test("whole numbers of any size", () => {
		expect(decodePart("cls", Buffer.from(" +1_000 "), options)).toBe(1000);
		expect(decodePart("id", Buffer.from("-12345678901234567890"), options)).toBe(-12345678901234567890n);
	});

	test("a compressed part may not inflate beyond a bound", () => {
		expect(decodePart("txt.gz", gzipSync("text"), options)).toBe("text");
		expect(() => decodePart("bin.gz", gzipSync(Buffer.alloc(2 ** 28 + 1)), options)).toThrow(
			"it inflates to more than",
		);
	});

	test("text parts have a largest size", () => {
		const text = Buffer.alloc(LARGEST_TEXT_PART + 1, "a");
		expect(() => decodePart("txt", text, options)).toThrow(`at most ${LARGEST_TEXT_PART}`);
		expect(decodePart("bin", text, options)).toBe(text);
	});
});
