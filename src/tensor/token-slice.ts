/** The tokens of a step's global batch that some rows hold. */

/** Tokens [first, first + count). */
export interface TokenRange {
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
