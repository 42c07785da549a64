/** Tensors of another format whose rows lie crosswise: the columns of a stack's experts in turn are rows of two halves here. */
import { expect, test } from "bun:test";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../../src/checkpoint/mapping.ts";
import { readTensor, type TensorStore } from "../../src/checkpoint/store.ts";
import { memoryStore } from "./memory-store.ts";

const [experts, width, rows] = [3, 5, 4];
const stack = Float32Array.from({ length: experts * width * 2 * rows }, (_, i) => i);

function correspondence(): CorrespondenceBuilder {
	const builder = new CorrespondenceBuilder("folder");
	builder.addForeign("stack", [experts, width, 2 * rows]);
	for (let expert = 0; expert < experts; expert++) {
		builder.addLogical(`expert${expert}`, [2 * rows, width]);
		for (const half of [0, 1]) {
			builder.link({
				logical: `expert${expert}`,
				logicalRuns: { offset: half * rows * width, stride: width },
				foreign: "stack",
				foreignRuns: { offset: expert * width * 2 * rows + half, stride: 2, step: 2 * rows },
				count: rows,
				length: width,
			});
		}
	}
	return builder;
}

/** All bytes of a tensor, asked for in pieces that split values. */
function inPieces(store: TensorStore, name: string, bytes: number, piece: number): Float32Array {
	const all = new Uint8Array(bytes);
	for (let at = 0; at < bytes; at += piece) store.readInto(name, at, all.subarray(at, Math.min(bytes, at + piece)));
	return new Float32Array(all.buffer);
}

test("stacks become experts and stacks again, in pieces of any size", () => {
	const source = memoryStore({ stack: { shape: [experts, width, 2 * rows], values: stack } });
	using logical = new MappedStore(source, planTensors(source, correspondence(), "logical"));
	for (let expert = 0; expert < experts; expert++) {
		const expected = Float32Array.from({ length: 2 * rows * width }, (_, i) => {
			const [row, column] = [Math.floor(i / width), i % width];
			// Even columns of the stack are the first half's rows.
			const from = row < rows ? 2 * row : 2 * (row - rows) + 1;
			return stack[(expert * width + column) * 2 * rows + from]!;
		});
		expect(readTensor(logical, `expert${expert}`)).toEqual(expected);
		for (const piece of [3, 18, 100]) {
			expect(inPieces(logical, `expert${expert}`, expected.byteLength, piece)).toEqual(expected);
		}
	}
	using back = new MappedStore(logical, planTensors(logical, correspondence(), "foreign"));
	expect(readTensor(back, "stack")).toEqual(stack);
	for (const piece of [5, 12, 333]) expect(inPieces(back, "stack", stack.byteLength, piece)).toEqual(stack);
});
