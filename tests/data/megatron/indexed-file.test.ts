/** Both layouts of Megatron's index, every type of values, and what is said of damage. */
import { afterAll, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { IndexedFile, IndexedWriter } from "../../../src/data/megatron/indexed-file.ts";
import { Scratch } from "../fixtures.ts";
import { indexBytes } from "./fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const path = (name: string) => join(scratch.path, name);

const documents = [[[1, 2, 3], [4]], [[]], [[5, 6]]];
const types = [
	[1, "uint8", Uint8Array],
	[2, "int8", Int8Array],
	[3, "int16", Int16Array],
	[4, "int32", Int32Array],
	[5, "int64", BigInt64Array],
	[8, "uint16", Uint16Array],
] as const;

function values(ids: readonly number[], Type: (typeof types)[number][2]): Uint8Array {
	const array = Type === BigInt64Array ? BigInt64Array.from(ids, BigInt) : new (Type as typeof Int32Array)(ids);
	return new Uint8Array(array.buffer);
}

/** Every sequence, and a piece of the first. */
function sequencesOf(file: IndexedFile): number[][] {
	const read = (sequence: number, offset: number, count: number) => {
		const into = new Int32Array(count + 1);
		file.read(sequence, { offset, count, vocabularySize: 100 }, into, 1);
		return [...into.subarray(1)];
	};
	return [...Array.from(file.lengths, (length, sequence) => read(sequence, 0, length)), read(0, 1, 2)];
}

test("every type of values, with and without modes", () => {
	for (const [code, name, Type] of types) {
		for (const modes of [undefined, [0, 1, 0, 1]]) {
			scratch.file("one.bin", values(documents.flat(2), Type));
			scratch.file("one.idx", indexBytes(documents, code, Type.BYTES_PER_ELEMENT, modes));
			using file = IndexedFile.open(path("one"));
			expect(file.type).toBe(name);
			expect(sequencesOf(file)).toEqual([[1, 2, 3], [4], [], [5, 6], [2, 3]]);
			expect([...file.documents]).toEqual([0, 2, 3, 4]);
			expect(file.modes === null ? undefined : [...file.modes]).toEqual(modes);
		}
	}
});

test("the older index", () => {
	scratch.file("old.bin", values(documents.flat(2), Int32Array));
	const numbers = [1, 4, 4, 4, 4, 4, ...[0, 1, 2, 3, 4], ...[0, 3, 4, 4, 6], ...[3, 1, 0, 2], ...[0, 2, 3, 4]];
	const index = (words: readonly number[]) =>
		Buffer.concat([Buffer.from("TNTIDX\0\0", "latin1"), Buffer.from(BigInt64Array.from(words, BigInt).buffer)]);
	scratch.file("old.idx", index(numbers));
	using file = IndexedFile.open(path("old"));
	expect(sequencesOf(file)).toEqual([[1, 2, 3], [4], [], [5, 6], [2, 3]]);
	expect([...file.documents]).toEqual([0, 2, 3, 4]);
	const broken = (at: number, value: number) => {
		scratch.file("old.idx", index(numbers.with(at, value)));
		return () => IndexedFile.open(path("old"));
	};
	expect(broken(2, 2)).toThrow("old.idx, byte 24: a value of int32 has 4 bytes, not 2.");
	expect(broken(4, 5)).toThrow("old.idx, byte 40: 4 sequences have 5 sizes, not one each.");
	expect(broken(5, 3)).toThrow("old.idx, byte 56: the counts make 192 bytes; the file has 200.");
	expect(broken(8, 7)).toThrow("old.idx, byte 72: a sequence is not a row of values.");
});

test("damage is one sentence with file and offset", () => {
	scratch.file("bad.bin", values(documents.flat(2), Int32Array));
	const whole = indexBytes(documents, 4, 4);
	const opening = (change: (bytes: Buffer) => Buffer | undefined) => {
		const bytes = Buffer.from(whole);
		scratch.file("bad.idx", change(bytes) ?? bytes);
		return () => IndexedFile.open(path("bad"));
	};
	const longs = (at: number, value: bigint) => opening((bytes) => void bytes.writeBigInt64LE(value, at));
	expect(opening((bytes) => void bytes.write("PK"))).toThrow(
		/bad\.idx is no index of Megatron's: it begins with neither MMIDIDX nor TNTIDX\.$/,
	);
	expect(opening(() => Buffer.alloc(0))).toThrow("bad.idx is no index of Megatron's");
	expect(longs(9, 2n)).toThrow("bad.idx, byte 9: its version is 2; version 1 is read.");
	expect(opening((bytes) => void bytes.writeUInt8(9, 17))).toThrow(
		"bad.idx, byte 17: there is no type of values 9; they are 1 to 8.",
	);
	expect(longs(18, -1n)).toThrow("bad.idx, byte 18: -1 is no number of sequences.");
	expect(opening((bytes) => bytes.subarray(0, 100))).toThrow(
		"bad.idx, byte 34: 4 sequences and 4 document bounds make 114 bytes, or 118 with modes; the file has 100.",
	);
	expect(longs(34 + 48 + 8, 9n)).toThrow("bad.idx, byte 98: documents are not in order.");
	expect(longs(34 + 48 + 24, 5n)).toThrow("bad.idx, byte 106: documents end at 5 of 4 sequences.");
	expect(opening((bytes) => void bytes.writeInt32LE(-1, 34))).toThrow(
		/bad\.idx: sequence 0 has -1 values of 4 bytes from byte 0 on; .*bad\.bin has 24 bytes\.$/,
	);
	expect(longs(34 + 16 + 24, 20n)).toThrow("sequence 3 has 2 values of 4 bytes from byte 20 on");
	scratch.file("bad.idx", whole);
	using file = IndexedFile.open(path("bad"));
	const read = (vocabularySize: number) => file.read(3, { offset: 0, count: 2, vocabularySize }, new Int32Array(2), 0);
	expect(() => read(6)).toThrow("bad.bin, byte 20: the token id 6 is outside the vocabulary of vocab-size 6.");
	writeFileSync(path("bad.bin"), readFileSync(path("bad.bin")).subarray(0, 20));
	expect(() => read(100)).toThrow("bad.bin became shorter while it was read.");
	scratch.file("float.bin", new Uint8Array(new Float32Array(documents.flat(2)).buffer));
	scratch.file("float.idx", indexBytes(documents, 7, 4));
	using floats = IndexedFile.open(path("float"));
	expect(() => floats.read(0, { offset: 0, count: 1, vocabularySize: 9 }, new Int32Array(1), 0)).toThrow(
		"float.bin holds float32 values, not token ids.",
	);
	expect(() => IndexedFile.open(path("absent"))).toThrow("absent.idx");
});

test("a writer that cannot write names the file", () => {
	expect(() => new IndexedWriter(path("none/a"), 10)).toThrow("none/a.bin: it does not exist.");
});
