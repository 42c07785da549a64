/** Boxes of flat ranges: every element of a tensor in exactly one, whatever the cuts. */
import { expect, test } from "bun:test";
import { partitionFault } from "../../../src/checkpoint/chunks.ts";
import { arrangedPieces, boxesOfRange, type LocalPart, piecesOf } from "../../../src/checkpoint/training/tensors.ts";
import { type Shard, shardBlocks } from "../../../src/parallel/shard.ts";

/** Row-major position of an element, and back. */
function indexOf(shape: readonly number[], at: readonly number[]): number {
	return at.reduce((index, value, axis) => index * shape[axis]! + value, 0);
}

function* elementsOf(offsets: readonly number[], sizes: readonly number[]): Generator<number[]> {
	const count = sizes.reduce((product, size) => product * size, 1);
	for (let i = 0; i < count; i++) {
		let rest = i;
		const at = [...sizes].reverse().map((size) => {
			const index = rest % size;
			rest = Math.floor(rest / size);
			return index;
		});
		yield at.reverse().map((value, axis) => value + offsets[axis]!);
	}
}

test("any range of a tensor is a list of boxes, in order", () => {
	for (const shape of [[7], [3, 4], [2, 3, 2], [1, 5, 3], [2, 1, 2, 3]]) {
		const count = shape.reduce((product, size) => product * size, 1);
		for (let from = 0; from < count; from++) {
			for (let to = from + 1; to <= count; to++) {
				const order = boxesOfRange(shape, from, to).flatMap(({ offsets, sizes }) =>
					[...elementsOf(offsets, sizes)].map((at) => indexOf(shape, at)),
				);
				expect(order).toEqual(Array.from({ length: to - from }, (_, i) => from + i));
			}
		}
	}
});

test("parts of all ranks, cut into slices anywhere, fill the tensor once and lie where the values are", () => {
	const cases: readonly (readonly [shape: number[], shard: Shard, liveRows?: number])[] = [
		[[8, 6], { kind: "split", dimension: 0 }],
		[[8, 6], { kind: "split", dimension: 0 }, 5],
		[[6, 8], { kind: "split", dimension: 1 }],
		[[12, 3], { kind: "split", dimension: 0, blocks: [4, 2, 6] }],
		[[12, 1, 4], { kind: "split", dimension: 0, blocks: [4, 8] }],
		[[10], { kind: "split", dimension: 0 }],
		[[24, 3], { kind: "split", dimension: 0, blocks: [12, 12], interleave: 3 }],
		[[24], { kind: "split", dimension: 0, blocks: [12, 12], interleave: 2 }],
		[[1, 9, 5], { kind: "replicated" }],
	];
	for (const [shape, shard, liveRows] of cases) {
		const size = shard.kind === "replicated" ? 1 : 2;
		const whole = liveRows === undefined ? shape : [liveRows, ...shape.slice(1)];
		for (const slices of [1, 2, 3, 7]) {
			const boxes: { offsets: readonly number[]; sizes: readonly number[] }[] = [];
			for (let rank = 0; rank < size; rank++) {
				const columnCut = shard.kind === "split" && shard.dimension === 1;
				const width = shape.slice(1).reduce((product, n) => product * n, 1) / (columnCut ? size : 1);
				const local = shape.reduce((product, n) => product * n, 1) / size;
				const blocks = shardBlocks(shape, shard, { rank, size }, liveRows);
				const part: LocalPart = { name: "w", shape: whole, offset: 64, width, blocks };
				const end = 64 + local;
				for (let slice = 0; slice < slices; slice++) {
					const cut = (index: number) => Math.floor((index * (end + 10)) / slices);
					for (const piece of piecesOf(part, cut(slice), cut(slice + 1))) {
						boxes.push(piece);
						expect(piece.position).toBeGreaterThanOrEqual(cut(slice));
						expect(piece.position + piece.elements).toBeLessThanOrEqual(cut(slice + 1));
						// The first element of the box is where the blocks say it is.
						const row = piece.offsets[0]!;
						const column = indexOf(whole.slice(1), piece.offsets.slice(1));
						const block = blocks.find((b) => row >= b.fullRow && row < b.fullRow + b.rows)!;
						const at = (block.localRow + row - block.fullRow) * width + column - block.fullColumn;
						expect(piece.position).toBe(64 + at);
					}
				}
			}
			expect(partitionFault(whole, boxes)).toBeNull();
		}
	}
});

test("interleaved rows become few boxes, with the values at the interleaved positions", () => {
	for (const [shape, interleave] of [
		[[24, 5], 3],
		[[24, 5], 12],
		[[24, 1, 2], 4],
		[[24], 2],
	] as const) {
		const width = shape.slice(1).reduce<number>((product, n) => product * n, 1);
		const shard: Shard = { kind: "split", dimension: 0, blocks: [12, 12], interleave };
		const blocks = shardBlocks(shape, shard, { rank: 0, size: 1 });
		const part: LocalPart = { name: "w", shape, offset: 7, width, blocks };
		for (const slices of [1, 2, 5]) {
			const found = new Float64Array(24 * width).fill(Number.NaN);
			let boxes = 0;
			for (let slice = 0; slice < slices; slice++) {
				const cut = (index: number) => 7 + Math.floor((index * 24 * width) / slices);
				const [begin, end] = [cut(slice), cut(slice + 1)];
				// Every element of the buffer says which one of the tensor it is.
				const buffer = Float64Array.from({ length: end - begin }, (_, i) => {
					const [row, column] = [Math.floor((begin + i - 7) / width), (begin + i - 7) % width];
					const block = blocks.find((b) => row >= b.localRow && row < b.localRow + b.rows)!;
					return (block.fullRow + row - block.localRow) * width + column;
				});
				const { pieces, moves } = arrangedPieces(part, begin, end);
				const moved = buffer.slice();
				for (const { from, to, elements } of moves) {
					moved.set(buffer.subarray(from - begin, from - begin + elements), to - begin);
				}
				for (const { offsets, sizes, position } of pieces) {
					for (const [i, at] of [...elementsOf(offsets, sizes)].entries()) {
						found[indexOf(shape, at)] = moved[position - begin + i]!;
					}
				}
				boxes += pieces.length;
			}
			expect([...found]).toEqual(Array.from({ length: 24 * width }, (_, i) => i));
			// Turns as long as the halves lie in order.
			if (slices === 1) expect(boxes).toBe(interleave === 12 ? 2 : 1);
		}
	}
});
