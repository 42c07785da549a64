/**
 * Describes a stretch of a flat parameter buffer as boxes of the logical tensors in it, each one run of the buffer.
 * Saving and loading both walk these, so a cut of the buffers (tensor, expert or data parallelism, ZeRO slices) only
 * decides which rank holds which boxes of the same logical tensors.
 */
import type { ShardBlock } from "../../parallel/index.ts";
import type { Box } from "../chunks.ts";

/** A logical tensor's part on this rank. */
export interface LocalPart {
	readonly name: string;
	/** Shape of the whole tensor. */
	readonly shape: readonly number[];
	/** First element in the buffer; rows of `width` elements follow. */
	readonly offset: number;
	readonly width: number;
	/** Its rectangles in the whole tensor, seen as [shape[0], rest]. */
	readonly blocks: readonly ShardBlock[];
}

/** A box of a logical tensor whose values are elements [position, position + elements) of the buffer. */
export interface Piece extends Box {
	readonly name: string;
	readonly shape: readonly number[];
	readonly position: number;
	readonly elements: number;
}

/** The boxes of a part that lie in elements [begin, end) of the buffer, in buffer order. */
export function piecesOf(part: LocalPart, begin: number, end: number): Piece[] {
	const { name, shape, offset, width } = part;
	const fullWidth = shape.slice(1).reduce((product, size) => product * size, 1);
	return part.blocks.flatMap((block) => {
		const cut = block.columns !== fullWidth;
		if (block.localColumn !== 0 || block.columns !== width || (cut && shape.length !== 2)) {
			throw new RangeError(
				`${name}: a rank's part of [${shape}] is not a list of whole rows, nor columns of a matrix.`,
			);
		}
		const first = offset + block.localRow * width;
		const [from, to] = [Math.max(begin, first) - first, Math.min(end, first + block.rows * width) - first];
		if (from >= to) return [];
		const local = cut ? [block.rows, width] : [block.rows, ...shape.slice(1)];
		let position = first + from;
		return boxesOfRange(local, from, to).map(({ offsets, sizes }) => {
			const elements = sizes.reduce((product, size) => product * size, 1);
			const whole = offsets.map((value, axis) => value + ([block.fullRow, cut ? block.fullColumn : 0][axis] ?? 0));
			const piece = { name, shape, offsets: whole, sizes, position, elements };
			position += elements;
			return piece;
		});
	});
}

/** Elements of a buffer that stand elsewhere in another order of it. */
export interface Move {
	readonly from: number;
	readonly to: number;
	readonly elements: number;
}

/**
 * The boxes of a part in elements [begin, end) of the buffer, in the order of the tensor and as few as can be, and how the
 * elements have to be moved for that, which stay in the same stretch: rows that a rank holds in turns
 * (docs/spec/moe-performance.md §1.5) would be a box a turn.
 */
export function arrangedPieces(part: LocalPart, begin: number, end: number): { pieces: Piece[]; moves: Move[] } {
	const pieces = piecesOf(part, begin, end);
	const before = (a: Piece, b: Piece) => a.offsets[0]! - b.offsets[0]! || a.position - b.position;
	if (pieces.every((piece, at) => at === 0 || before(pieces[at - 1]!, piece) <= 0)) return { pieces, moves: [] };
	const moves: Move[] = [];
	const arranged: Piece[] = [];
	let position = pieces[0]!.position;
	for (const piece of pieces.toSorted(before)) {
		moves.push({ from: piece.position, to: position, elements: piece.elements });
		const last = arranged.at(-1);
		if (last && follows(last, piece)) {
			const sizes = [last.sizes[0]! + piece.sizes[0]!, ...last.sizes.slice(1)];
			arranged[arranged.length - 1] = { ...last, sizes, elements: last.elements + piece.elements };
		} else arranged.push({ ...piece, position });
		position += piece.elements;
	}
	return { pieces: arranged, moves };
}

/** Whether a box begins where another ends, both being rows of the same columns. */
function follows(first: Piece, second: Piece): boolean {
	return (
		first.offsets[0]! + first.sizes[0]! === second.offsets[0] &&
		first.offsets.slice(1).join() === second.offsets.slice(1).join() &&
		first.sizes.slice(1).join() === second.sizes.slice(1).join()
	);
}

/** Elements [from, to) of a dense tensor, not empty, as boxes in order: the end of a row, whole rows, the start of one. */
export function boxesOfRange(shape: readonly number[], from: number, to: number): Box[] {
	const [, ...rest] = shape;
	if (rest.length === 0) return [{ offsets: [from], sizes: [to - from] }];
	const stride = rest.reduce((product, size) => product * size, 1);
	const row = Math.floor(from / stride);
	const below = (box: Box, at: number): Box => ({ offsets: [at, ...box.offsets], sizes: [1, ...box.sizes] });
	const boxes: Box[] = [];
	let at = from;
	if (from % stride !== 0) {
		at = Math.min(to, (row + 1) * stride);
		boxes.push(...boxesOfRange(rest, from - row * stride, at - row * stride).map((box) => below(box, row)));
	}
	const [begin, end] = [at / stride, Math.floor(to / stride)];
	if (end > begin) boxes.push({ offsets: [begin, ...rest.map(() => 0)], sizes: [end - begin, ...rest] });
	const tail = Math.max(at, end * stride);
	if (tail < to)
		boxes.push(...boxesOfRange(rest, tail - end * stride, to - end * stride).map((box) => below(box, end)));
	return boxes;
}
