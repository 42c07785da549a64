/**
 * Context parallelism: every rank holds an equal run of a microbatch's tokens, in the order of ranks. Operations that mix tokens
 * exchange runs of tokens for blocks of columns, as DeepSpeed-Ulysses does with heads, or take the last tokens of the rank before.
 */
import { axpby, contiguous, copyInto, type FloatDtype, type Tape, Tensor } from "../tensor/index.ts";
import { consecutive, type Group } from "./group.ts";

/** Columns [first, first + count). */
export interface ColumnRange {
	readonly first: number;
	readonly count: number;
}

/** Columns of x_(T/cp)C that each member gets, one range after the other. Members get equally many; ranges of two may overlap. */
export interface Dealt {
	readonly x: Tensor;
	readonly ranges: (member: number) => readonly ColumnRange[];
}

/** Exchanges `from`, an equal block of rows for each member, for theirs. */
function exchangeBlocks(from: Tensor, to: Tensor, cp: Group): void {
	const blocks = consecutive(new Array<number>(cp.size).fill(from.rows / cp.size));
	cp.allToAll(from, blocks, to, blocks).wait();
}

/** Calls `visit` with the windows of every range of every member, in x or its gradient and in the blocks of rows. */
function visitRanges(
	{ x, ranges }: Dealt,
	blocks: Tensor,
	{ members, column }: { readonly members: number; readonly column: number },
	visit: (own: Tensor, block: Tensor) => void,
): void {
	for (let member = 0; member < members; member++) {
		using rows = blocks.rowsFrom(member * x.rows, x.rows);
		let at = column;
		for (const { first, count } of ranges(member)) {
			using own = x.columns(first, count);
			using block = rows.columns(at, count);
			visit(own, block);
			at += count;
		}
	}
}

/** Columns that each member gets. */
function widthOf({ ranges }: Dealt): number {
	return ranges(0).reduce((sum, { count }) => sum + count, 0);
}

/**
 * x_(T/cp)C of each rank, several side by side → the ranges of this rank's columns of all tokens, y_TW. Backward: the ranges'
 * gradients go back to the tokens' ranks, where those of columns that several members got add up.
 */
export function tokensForColumns(tape: Tape, parts: readonly Dealt[], cp: Group): Tensor {
	const { device } = tape;
	const [{ x: first }] = parts as [Dealt];
	const dtype = first.dtype as FloatDtype;
	const widths = parts.map(widthOf);
	const columns = widths.map((_, index) => widths.slice(0, index).reduce((sum, width) => sum + width, 0));
	const shape = [cp.size * first.rows, widths.reduce((sum, width) => sum + width, 0)];
	const wanted = parts.some(({ x }) => x.gradient !== null);
	const y = tape.output(Tensor.empty(device, shape, dtype), wanted);
	{
		using blocks = Tensor.empty(device, shape, dtype, "communication");
		for (const [index, part] of parts.entries()) {
			visitRanges(part, blocks, { members: cp.size, column: columns[index]! }, copyInto);
		}
		exchangeBlocks(blocks, y, cp);
	}
	tape.record({
		name: "tokens_for_columns",
		outputs: [y],
		backward: ([dy]) => {
			using blocks = Tensor.empty(device, shape, dtype, "communication");
			using whole = contiguous(dy!);
			exchangeBlocks(whole, blocks, cp);
			for (const [index, { x, ranges }] of parts.entries()) {
				if (x.gradient === null) continue;
				const dx = x.gradient.contiguousTarget();
				device.setZero(dx, dx.bytes);
				visitRanges({ x: dx, ranges }, blocks, { members: cp.size, column: columns[index]! }, (own, block) =>
					axpby(block, own, 1, 1),
				);
				x.gradient.accumulate(dx);
			}
		},
	});
	return y;
}

/** x_T(C/cp) of each rank → all columns of this rank's tokens, y_(T/cp)C. Backward: the reverse. */
export function columnsForTokens(tape: Tape, x: Tensor, cp: Group): Tensor {
	const { device } = tape;
	const { width } = x;
	const rows = x.rows / cp.size;
	const dtype = x.dtype as FloatDtype;
	const y = tape.output(Tensor.empty(device, [rows, width * cp.size], dtype), x.gradient !== null);
	const visit = (whole: Tensor, blocks: Tensor, move: (column: Tensor, block: Tensor) => void) => {
		for (let member = 0; member < cp.size; member++) {
			using block = blocks.rowsFrom(member * rows, rows);
			using column = whole.columns(member * width, width);
			move(column, block);
		}
	};
	{
		using blocks = Tensor.empty(device, x.shape, dtype, "communication");
		using whole = contiguous(x);
		exchangeBlocks(whole, blocks, cp);
		visit(y, blocks, (column, block) => copyInto(block, column));
	}
	tape.record({
		name: "columns_for_tokens",
		outputs: [y],
		backward: ([dy]) => {
			using blocks = Tensor.empty(device, x.shape, dtype, "communication");
			visit(dy!, blocks, copyInto);
			const dx = x.gradient!.contiguousTarget();
			exchangeBlocks(blocks, dx, cp);
			x.gradient!.accumulate(dx);
		},
	});
	return y;
}

/**
 * x_(T/cp)C → `count` last rows of the rank before, then x: [count + T/cp, C]; the first rank's are zeros. Backward: the gradient of
 * those rows goes back to that rank. Throws a RangeError if a rank has fewer rows.
 */
export function withRowsBefore(tape: Tape, x: Tensor, count: number, cp: Group): Tensor {
	const { device } = tape;
	if (x.rows < count)
		throw new RangeError(`${cp.name}: ${x.rows} tokens of a rank are fewer than ${count} of a convolution.`);
	const dtype = x.dtype as FloatDtype;
	const y = tape.output(Tensor.empty(device, [count + x.rows, x.width], dtype), x.gradient !== null);
	const gathered = (rows: Tensor) => {
		using own = Tensor.empty(device, [count, x.width], dtype, "communication");
		copyInto(rows, own);
		const all = Tensor.empty(device, [cp.size * count, x.width], dtype, "communication");
		cp.allGather(own, all).wait();
		return all;
	};
	{
		using last = x.rowsFrom(x.rows - count, count);
		using all = gathered(last);
		using before = y.rowsFrom(0, count);
		using own = y.rowsFrom(count, x.rows);
		copyInto(x, own);
		if (cp.rank === 0) device.setZero(before, before.bytes);
		else {
			using theirs = all.rowsFrom((cp.rank - 1) * count, count);
			copyInto(theirs, before);
		}
	}
	tape.record({
		name: "with_rows_before",
		outputs: [y],
		backward: ([dy]) => {
			using before = dy!.rowsFrom(0, count);
			using own = dy!.rowsFrom(count, x.rows);
			using all = gathered(before);
			const dx = x.gradient!.target();
			copyInto(own, dx);
			if (cp.rank < cp.size - 1) {
				using last = dx.rowsFrom(x.rows - count, count);
				using theirs = all.rowsFrom((cp.rank + 1) * count, count);
				axpby(theirs, last, 1, 1);
			}
			x.gradient!.accumulate(dx);
		},
	});
	return y;
}
