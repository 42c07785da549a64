/** Extremes of any number of values; Math.max and Math.min take only some hundred thousand arguments. */

/** The largest value; -Infinity without values. */
export const largestOf = (values: readonly number[]): number =>
	values.reduce((most, value) => Math.max(most, value), Number.NEGATIVE_INFINITY);

/** The smallest value; Infinity without values. */
export const leastOf = (values: readonly number[]): number =>
	values.reduce((least, value) => Math.min(least, value), Number.POSITIVE_INFINITY);
