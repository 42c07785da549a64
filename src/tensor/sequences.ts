/**
 * Boundaries of the sequences of a packed microbatch. Tokens of all sequences are concatenated; attention and the state space
 * scan never cross a boundary. Sequences may be empty.
 */
import type { Device } from "../native/device.ts";
import { Tensor } from "./tensor.ts";

export class Sequences implements Disposable {
	private constructor(
		/** Cumulative token counts on the device, int32 [count + 1]: first 0, last `tokens`. */
		readonly cuSeqlens: Tensor,
		/** Tokens of every sequence, on the host. */
		readonly lengths: readonly number[],
		/** Tokens of all sequences. */
		readonly tokens: number,
		/** Tokens of the longest sequence. */
		readonly maxSeqlen: number,
	) {}

	/** Sequences of these lengths, packed in this order. */
	static of(device: Device, lengths: readonly number[]): Sequences {
		const ends = new Int32Array(lengths.length + 1);
		let tokens = 0;
		for (const [index, length] of lengths.entries()) {
			tokens += length;
			if (!Number.isInteger(length) || length < 0 || tokens > 0x7fffffff) {
				throw new RangeError(`Sequence ${index} cannot have ${length} tokens.`);
			}
			ends[index + 1] = tokens;
		}
		const longest = lengths.reduce((most, length) => Math.max(most, length), 0);
		return new Sequences(Tensor.from(device, ends), [...lengths], tokens, longest);
	}

	/** A batch of `batch` sequences of `length` tokens each. */
	static batch(device: Device, batch: number, length: number): Sequences {
		return Sequences.of(device, new Array<number>(batch).fill(length));
	}

	/** Number of sequences. */
	get count(): number {
		return this.lengths.length;
	}

	[Symbol.dispose](): void {
		this.cuSeqlens[Symbol.dispose]();
	}
}

// The tokens of a step's global batch that some rows hold.

/** Tokens [first, first + count). */
interface TokenRange {
	readonly first: number;
	readonly count: number;
}

/** Ranges in the order of the rows. Dropout masks follow it, so that no layout matters. */
export class TokenSlice {
	readonly count: number;

	constructor(readonly ranges: readonly TokenRange[]) {
		this.count = ranges.reduce((sum, { count }) => sum + count, 0);
	}

	/** Neighbours. */
	static of(first: number, count: number): TokenSlice {
		return new TokenSlice([{ first, count }]);
	}

	/** Index of row 0's token, where the rows are neighbours; 0 without rows. */
	get first(): number {
		const [range] = this.ranges;
		if (!range) return 0;
		if (this.ranges.length !== 1) throw new RangeError("These rows are not neighbouring tokens.");
		return range.first;
	}

	/** Rows [begin, begin + count) of these. */
	rows(begin: number, count: number): TokenSlice {
		let at = 0;
		const ranges = this.ranges.flatMap((range) => {
			const from = Math.max(begin - at, 0);
			const to = Math.min(begin + count - at, range.count);
			at += range.count;
			return from < to ? [{ first: range.first + from, count: to - from }] : [];
		});
		return new TokenSlice(ranges);
	}

	/** Number of these tokens among [first, first + count). */
	within(first: number, count: number): number {
		return this.ranges.reduce((sum, range) => {
			const common = Math.min(range.first + range.count, first + count) - Math.max(range.first, first);
			return sum + Math.max(0, common);
		}, 0);
	}

	/** Member `rank`'s of `size` equal runs of rows. */
	cut({ rank, size }: { readonly rank: number; readonly size: number }): TokenSlice {
		const count = this.count / size;
		return this.rows(rank * count, count);
	}
}
