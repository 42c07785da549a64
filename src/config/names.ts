/** Spelling of names: camelCase, and the nearest known name for a mistyped one. */

export type CamelCase<Name extends string> = Name extends `${infer Head}-${infer Tail}`
	? `${Head}${Capitalize<CamelCase<Tail>>}`
	: Name;

/** "adam-beta1" → "adamBeta1". */
export function camelCase(name: string): string {
	return name.replace(/-(.)/g, (_, letter: string) => letter.toUpperCase());
}

/** Levenshtein distance with swaps of neighbours counted as one edit (optimal string alignment). */
export function editDistance(a: string, b: string): number {
	let before: number[] = [];
	let previous = Array.from({ length: b.length + 1 }, (_, j) => j);
	for (let i = 1; i <= a.length; i++) {
		const row = [i];
		for (let j = 1; j <= b.length; j++) {
			const substitution = previous[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1);
			row[j] = Math.min(previous[j]! + 1, row[j - 1]! + 1, substitution);
			if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) {
				row[j] = Math.min(row[j]!, before[j - 2]! + 1);
			}
		}
		before = previous;
		previous = row;
	}
	return previous[b.length]!;
}

/** The candidate with the smallest edit distance, the first of equals; null where a third of the name is another. */
export function nearestName(name: string, candidates: readonly string[]): string | null {
	let best: string | null = null;
	let distance = Math.max(1, Math.floor(name.length / 3)) + 1;
	for (const candidate of candidates) {
		// No fewer edits than the lengths differ by: a long name costs nothing.
		if (Math.abs(name.length - candidate.length) >= distance) continue;
		const d = editDistance(name, candidate);
		if (d < distance) {
			best = candidate;
			distance = d;
		}
	}
	return best;
}

/** The end of a sentence about an unknown name: "; the nearest is …", or "" when no name is near. */
export function nearestHint(name: string, candidates: readonly string[], prefix = ""): string {
	const nearest = nearestName(name, candidates);
	return nearest === null ? "" : `; the nearest is ${prefix}${nearest}`;
}
