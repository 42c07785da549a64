import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { bytesOf } from "../../src/checkpoint/dtype.ts";
import { openSafetensors, type TensorEntry, writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { UserError } from "../../src/system/errors.ts";
import { randomValues } from "../support.ts";

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-safetensors-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const values = randomValues(15, 1);
const entries: TensorEntry[] = [
	{ name: "bytes", dtype: "U8", shape: [3], data: () => Uint8Array.of(1, 2, 3) },
	{ name: "matrix", dtype: "F32", shape: [3, 5], data: () => values },
	{ name: "half", dtype: "BF16", shape: [2], data: () => [Uint16Array.of(0x3f80), Uint16Array.of(0x4000)] },
	{ name: "scalar", dtype: "I64", shape: [], data: () => BigInt64Array.of(-7n) },
	{ name: "empty", dtype: "F64", shape: [0, 4], data: () => new Float64Array(0) },
	{ name: "12", dtype: "F32", shape: [1], data: () => Float32Array.of(12) },
	{ name: "__proto__", dtype: "F32", shape: [1], data: () => Float32Array.of(13) },
];

/** A file of this header text and so many data bytes. */
function fileOf(name: string, header: string, dataBytes: number, headerLength?: bigint): string {
	const text = new TextEncoder().encode(header);
	const length = new Uint8Array(8);
	new DataView(length.buffer).setBigUint64(0, headerLength ?? BigInt(text.length), true);
	const path = join(folder, name);
	writeFileSync(path, Buffer.concat([length, text, new Uint8Array(dataBytes)]));
	return path;
}

test("values, shapes and metadata come back", () => {
	const path = join(folder, "round-trip.safetensors");
	const size = writeSafetensors(path, entries, { format: "pt", note: "ü" });
	expect(size).toBe(readFileSync(path).length);
	using file = openSafetensors(path);
	expect(Object.fromEntries(file.metadata)).toEqual({ format: "pt", note: "ü" });
	expect(file.tensors.size).toBe(entries.length);
	for (const { name, dtype, shape, data } of entries) {
		const information = file.information(name);
		expect(information.dtype).toBe(dtype);
		expect(information.shape).toEqual([...shape]);
		const expected = data();
		const pieces = (ArrayBuffer.isView(expected) ? [expected] : [...expected]).map(bytesOf);
		expect(bytesOf(file.read(name))).toEqual(new Uint8Array(Buffer.concat(pieces)));
	}
	const window = new Uint8Array(8);
	file.readInto("matrix", 4, window);
	expect(window).toEqual(bytesOf(values).slice(4, 12));
	expect(() => file.read("absent")).toThrow(`${path} has no tensor absent.`);
});

test("the data is aligned and equal content gives equal bytes", () => {
	const [a, b] = [join(folder, "a.safetensors"), join(folder, "b.safetensors")];
	writeSafetensors(a, entries);
	writeSafetensors(b, [...entries].reverse());
	expect(readFileSync(a)).toEqual(readFileSync(b));
	using file = openSafetensors(a);
	for (const { position, dtype } of file.tensors.values()) {
		if (dtype === "F32") expect(position % 4).toBe(0);
		if (dtype === "F64" || dtype === "I64") expect(position % 8).toBe(0);
	}
});

test("a failing write leaves nothing behind", () => {
	const before = readdirSync(folder).length;
	const path = join(folder, "never.safetensors");
	const short: TensorEntry = { name: "short", dtype: "F32", shape: [2], data: () => new Float32Array(1) };
	expect(() => writeSafetensors(path, [short])).toThrow("short of shape [2] got 4 bytes, not 8");
	expect(() => writeSafetensors(path, [entries[0]!, entries[0]!])).toThrow("Tensor bytes would be written twice");
	expect(readdirSync(folder).length).toBe(before);
	expect(() => writeSafetensors(join(folder, "no/where.safetensors"), entries)).toThrow("it does not exist");
});

test("tensors beyond 4 GiB are found", () => {
	const bytes = 2 ** 32 + 8;
	const header = `{"wide":{"dtype":"U8","shape":[${bytes}],"data_offsets":[0,${bytes}]},"last":{"dtype":"F32","shape":[1],"data_offsets":[${bytes},${bytes + 4}]}}`;
	const path = fileOf("sparse.safetensors", header, 0);
	truncateSync(path, 8 + header.length + bytes + 4);
	using file = openSafetensors(path);
	expect(file.read("last")).toEqual(Float32Array.of(0));
	const window = new Uint8Array(4);
	file.readInto("wide", bytes - 4, window);
	expect(window).toEqual(new Uint8Array(4));
});

describe("what is refused, by name", () => {
	const tensor = (dtype: string, shape: string, begin: number, end: number) =>
		`{"dtype":"${dtype}","shape":${shape},"data_offsets":[${begin},${end}]}`;
	const cases: [string, string, number, string][] = [
		["not JSON", "{x", 0, "its header is not UTF-8 JSON"],
		["an array", "[]", 0, "its header does not begin with {"],
		["an unknown dtype", `{"w":${tensor("F31", "[1]", 0, 4)}}`, 4, 'tensor w has an unknown dtype "F31"'],
		["an inherited dtype", `{"w":${tensor("toString", "[1]", 0, 4)}}`, 4, "tensor w has an unknown dtype"],
		["a negative size", `{"w":${tensor("F32", "[-1]", 0, 4)}}`, 4, "tensor w has an invalid shape [-1]"],
		["a fraction", `{"w":${tensor("F32", "[1.5]", 0, 6)}}`, 6, "tensor w has an invalid shape [1.5]"],
		["a size that overflows", `{"w":${tensor("F32", "[4294967296,4294967296]", 0, 0)}}`, 0, "has an invalid size"],
		["a wrong span", `{"w":${tensor("F32", "[2]", 0, 4)}}`, 4, "tensor w of shape [2] F32 needs 8 bytes"],
		["reversed offsets", `{"w":${tensor("F32", "[1]", 4, 0)}}`, 4, "tensor w has invalid data_offsets [4,0]"],
		["a range past the end", `{"w":${tensor("F32", "[4]", 0, 16)}}`, 8, "tensor w ends at byte"],
		[
			"an overlap",
			`{"v":${tensor("F32", "[2]", 0, 8)},"w":${tensor("F32", "[2]", 4, 12)}}`,
			12,
			"tensor w overlaps tensor v",
		],
		[
			"a gap",
			`{"v":${tensor("F32", "[1]", 0, 4)},"w":${tensor("F32", "[1]", 8, 12)}}`,
			12,
			"there is a gap of 4 bytes between tensor v and tensor w",
		],
		["trailing bytes", `{"w":${tensor("F32", "[1]", 0, 4)}}`, 5, "1 bytes follow tensor w"],
		["a name twice", `{"w":${tensor("F32", "[0]", 0, 0)},"w":${tensor("F32", "[0]", 0, 0)}}`, 0, "a name occurs twice"],
		["metadata that is not a string", `{"__metadata__":{"a":1}}`, 0, "its __metadata__ value a is not a string"],
		["deep nesting", `{"w":{"shape":${"[".repeat(50)}${"]".repeat(50)}}}`, 0, "its header is nested too deeply"],
		["very deep nesting", `{"w":${"[".repeat(1e6)}${"]".repeat(1e6)}}`, 0, "its header is"],
		["an unknown field", `{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":1}}`, 0, "unknown field x"],
	];
	for (const [what, header, dataBytes, sentence] of cases) {
		test(what, () => {
			const path = fileOf("hostile.safetensors", header, dataBytes);
			let failure: unknown;
			try {
				openSafetensors(path);
			} catch (error) {
				failure = error;
			}
			expect(failure).toBeInstanceOf(UserError);
			expect((failure as Error).message).toStartWith(`${path} is not a valid safetensors file: `);
			expect((failure as Error).message).toContain(sentence);
		});
	}

	test("wrong header lengths", () => {
		expect(() => openSafetensors(fileOf("h.safetensors", "{}", 0, 2n ** 63n))).toThrow("its header would have");
		expect(() => openSafetensors(fileOf("h.safetensors", "{}", 0, 3n))).toThrow("is cut off at 2");
		writeFileSync(join(folder, "h.safetensors"), "seven77");
		expect(() => openSafetensors(join(folder, "h.safetensors"))).toThrow("it has 7 bytes");
	});

	test("no file, a folder, a link", () => {
		expect(() => openSafetensors(join(folder, "none"))).toThrow("it does not exist");
		expect(() => openSafetensors(folder)).toThrow("it is a folder");
		symlinkSync("round-trip.safetensors", join(folder, "link"));
		openSafetensors(join(folder, "link"))[Symbol.dispose]();
		expect(() => openSafetensors(join(folder, "link"), { followLinks: false })).toThrow("it is a symbolic link");
	});

	test("a truncation anywhere", () => {
		const whole = readFileSync(join(folder, "a.safetensors"));
		const path = join(folder, "cut.safetensors");
		for (let length = 0; length < whole.length; length += 7) {
			writeFileSync(path, whole.subarray(0, length));
			expect(() => openSafetensors(path)).toThrow(path);
		}
	});
});
