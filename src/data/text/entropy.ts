/** How well simple models could code a byte string: the yardsticks beside a trained model's bits per byte. */

/** Entropy of the byte frequencies, bits per byte. */
export function unigramEntropy(bytes: ArrayLike<number>): number {
	const counts = new Float64Array(256);
	for (let i = 0; i < bytes.length; i++) counts[bytes[i]!]! += 1;
	return entropy(counts, bytes.length);
}

/** Entropy of a byte given the byte before it, from the string's own pair frequencies, bits per byte. */
export function bigramEntropy(bytes: ArrayLike<number>): number {
	const pairs = new Float64Array(65536);
	const firsts = new Float64Array(256);
	for (let i = 1; i < bytes.length; i++) {
		pairs[bytes[i - 1]! * 256 + bytes[i]!]! += 1;
		firsts[bytes[i - 1]!]! += 1;
	}
	const total = bytes.length - 1;
	return entropy(pairs, total) - entropy(firsts, total);
}

function entropy(counts: Float64Array, total: number): number {
	return counts.reduce((bits, count) => (count === 0 ? bits : bits - (count / total) * Math.log2(count / total)), 0);
}
