/** Extremes and the median of any number of values; Math.max and Math.min take only some hundred thousand arguments. */

/** The largest value; -Infinity without values. */
export const largestOf = (values: readonly number[]): number =>
	values.reduce((most, value) => Math.max(most, value), Number.NEGATIVE_INFINITY);

/** The smallest value; Infinity without values. */
export const leastOf = (values: readonly number[]): number =>
	values.reduce((least, value) => Math.min(least, value), Number.POSITIVE_INFINITY);

/** The median, for an even number of values the mean of the two middle values; NaN without values. */
export function median(values: readonly number[]): number {
	const sorted = values.toSorted((a, b) => a - b);
	const middle = sorted.length >> 1;
	return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}
