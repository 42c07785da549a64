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

/** Most wrong letters of a word. */
const wrongLetters = (word: string) => Math.max(1, Math.floor(word.length / 4));

/** Edits between two spellings of a name; null if they are too many for a misspelling. A dash counts as a letter, or not at all. */
function spellingEdits(name: string, candidate: string): number | null {
	const most = Math.max(1, Math.floor(name.length / 6));
	// A single word may have more wrong letters, such as dokter for doctor.
	const alone = name.includes("-") || candidate.includes("-") ? most : Math.max(1, Math.floor(name.length / 3));
	// The distance is at least the difference in length; this skips its computation for long names.
	if (Math.abs(name.length - candidate.length) > alone) return null;
	const edits = editDistance(name, candidate);
	return edits <= alone && editDistance(name.replaceAll("-", ""), candidate.replaceAll("-", "")) <= alone
		? edits
		: null;
}

/**
 * Matches every word of a name with a word of the candidate, in any order. Returns the edits and the number of the candidate's
 * words left over (`further`), at most two; null if a word has no match. With words left over, the first words have to be equal
 * (after a leading `use`), and so do words of up to four letters with their matches.
 */
function wordEdits(name: string, candidate: string): { readonly edits: number; readonly further: number } | null {
	const own = name.split("-");
	const rest = candidate.split("-");
	const further = rest.length - own.length;
	if (further < 0 || further > 2) return null;
	const begins = rest[0] === own[0] || (rest[0] === "use" && rest[1] === own[0]);
	if (further > 0 && !begins) return null;
	let edits = 0;
	for (const word of own) {
		const distances = rest.map((other) =>
			Math.abs(word.length - other.length) > wrongLetters(other) + 1
				? Number.POSITIVE_INFINITY
				: editDistance(word, other),
		);
		const least = Math.min(...distances);
		if (least > (further === 0 || word.length > 4 ? wrongLetters(word) : 0)) return null;
		rest.splice(distances.indexOf(least), 1);
		edits += least;
	}
	return { edits, further };
}

/**
 * The candidate that a mistyped name probably means: the candidate with the fewest edits, the first of equals; else the only
 * candidate with the fewest further words. Returns null when no candidate is near.
 */
export function nearestName(name: string, candidates: readonly string[]): string | null {
	let best: string | null = null;
	let fewest = Number.POSITIVE_INFINITY;
	let unique = true;
	for (const candidate of candidates) {
		const words = wordEdits(name, candidate);
		const spelling = spellingEdits(name, candidate);
		if (words === null && spelling === null) continue;
		// A further word weighs more than any number of letters.
		const cost = Math.min(
			spelling ?? Number.POSITIVE_INFINITY,
			words ? words.edits + 100 * words.further : Number.POSITIVE_INFINITY,
		);
		if (cost < fewest) [best, fewest, unique] = [candidate, cost, true];
		else if (cost === fewest) unique = false;
	}
	return fewest < 100 || unique ? best : null;
}

/** The end of a sentence about an unknown name: "; the nearest is …", or "" when no name is near. */
export function nearestHint(name: string, candidates: readonly string[], prefix = ""): string {
	const nearest = nearestName(name, candidates);
	return nearest === null ? "" : `; the nearest is ${prefix}${nearest}`;
}
