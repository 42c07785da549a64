/** Indexed data as reference.py draws them. */
import { writeFileSync } from "node:fs";
import { IndexedWriter } from "../../../src/data/megatron/indexed-file.ts";

export interface DrawnSet {
	readonly name: string;
	readonly seed: number;
	readonly sequences: number;
	readonly longest: number;
	readonly dtype: "uint16" | "int16" | "int32" | "int64";
}

export const vocabularySize = 997;
/** Token that ends a document. */
export const endId = 3;

/** A linear congruential generator with 32 bits of state, of which the upper 16 are drawn. */
function* numbers(seed: number): Generator<number, never> {
	for (let state = seed; ; ) {
		state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
		yield state >>> 16;
	}
}

/** The documents of a set, each a list of sequences. */
export function drawnDocuments({ seed, sequences, longest }: DrawnSet): number[][][] {
	const drawn = numbers(seed);
	const next = () => drawn.next().value;
	const documents: number[][][] = [[]];
	for (let i = 0; i < sequences; i++) {
		const length = next() % (longest + 1);
		documents.at(-1)!.push(Array.from({ length }, () => next() % vocabularySize));
		if (next() % 3 === 0 && i < sequences - 1) documents.push([]);
	}
	return documents;
}

/** Writes a set as Megatron's builder does; types that IndexedWriter has not are put together here. */
export function writeSet(prefix: string, set: DrawnSet): void {
	const documents = drawnDocuments(set);
	if (set.dtype === "uint16" || set.dtype === "int32") {
		using writer = new IndexedWriter(prefix, set.dtype === "uint16" ? vocabularySize : 100_000);
		for (const sequences of documents) {
			writer.add(
				Int32Array.from(sequences.flat()),
				sequences.map(({ length }) => length),
			);
		}
		writer.finish();
		return;
	}
	const ids = documents.flat(2);
	const values = set.dtype === "int16" ? Int16Array.from(ids) : BigInt64Array.from(ids, BigInt);
	writeFileSync(`${prefix}.bin`, new Uint8Array(values.buffer));
	writeFileSync(`${prefix}.idx`, indexBytes(documents, set.dtype === "int16" ? 3 : 5, values.BYTES_PER_ELEMENT));
}

/** Bytes of a .idx file; `modes` of every sequence where they are given. */
export function indexBytes(documents: readonly (readonly number[])[][], code: number, size: number, modes?: number[]) {
	const lengths = documents.flat().map(({ length }) => length);
	const sums = (counts: readonly number[]) => {
		const all = [0];
		for (const count of counts) all.push(all.at(-1)! + count);
		return all;
	};
	const pointers = sums(lengths.map((length) => size * length)).slice(0, -1);
	const bounds = sums(documents.map(({ length }) => length));
	const counts = BigInt64Array.of(1n);
	return Buffer.concat([
		Buffer.from("MMIDIDX\0\0", "latin1"),
		Buffer.from(counts.buffer),
		Buffer.of(code),
		Buffer.from(BigInt64Array.from([lengths.length, bounds.length], BigInt).buffer),
		Buffer.from(Int32Array.from(lengths).buffer),
		Buffer.from(BigInt64Array.from([...pointers, ...bounds], BigInt).buffer),
		Buffer.from(Int8Array.from(modes ?? []).buffer),
	]);
}
