/** Byte-pair encoding by ranks of whole tokens, as tiktoken and SentencePiece do it: any two neighbours that join to a token may merge. */

/** A possible merge: the symbol at a place with the one that follows it. */
interface Pair {
	readonly rank: number;
	readonly left: number;
	/** Characters of both symbols: another length says that one of them has changed since. */
	readonly length: number;
}

const isBefore = (a: Pair, b: Pair) => a.rank < b.rank || (a.rank === b.rank && a.left < b.left);

/** A heap with the pair that merges next on top. */
class Agenda {
	readonly #pairs: Pair[] = [];

	push(pair: Pair): void {
		const pairs = this.#pairs;
		let at = pairs.push(pair) - 1;
		while (at > 0) {
			const parent = (at - 1) >> 1;
			if (!isBefore(pair, pairs[parent]!)) break;
			pairs[at] = pairs[parent]!;
			at = parent;
		}
		pairs[at] = pair;
	}

	pop(): Pair | undefined {
		const pairs = this.#pairs;
		const top = pairs[0];
		const last = pairs.pop();
		if (last === undefined || pairs.length === 0) return top;
		let at = 0;
		for (;;) {
			let child = 2 * at + 1;
			if (child >= pairs.length) break;
			if (child + 1 < pairs.length && isBefore(pairs[child + 1]!, pairs[child]!)) child++;
			if (!isBefore(pairs[child]!, last)) break;
			pairs[at] = pairs[child]!;
			at = child;
		}
		pairs[at] = last;
		return top;
	}
}

/**
 * Merges neighbours until no two join to a token: the pair of the lowest rank first, of equal ranks the leftmost. `rankOf` a text
 * that is no token is undefined.
 */
export function mergeByRank(symbols: readonly string[], rankOf: (token: string) => number | undefined): string[] {
	const texts = [...symbols];
	const next = Int32Array.from(texts, (_, i) => (i + 1 < texts.length ? i + 1 : -1));
	const previous = Int32Array.from(texts, (_, i) => i - 1);
	const agenda = new Agenda();
	const consider = (left: number, right: number) => {
		if (left < 0 || right < 0) return;
		const joined = texts[left]! + texts[right]!;
		const rank = rankOf(joined);
		if (rank !== undefined) agenda.push({ rank, left, length: joined.length });
	};
	for (let i = 1; i < texts.length; i++) consider(i - 1, i);
	for (let pair = agenda.pop(); pair !== undefined; pair = agenda.pop()) {
		const { left, length } = pair;
		const right = next[left]!;
		if (texts[left] === "" || right < 0 || texts[left]!.length + texts[right]!.length !== length) continue;
		texts[left] += texts[right]!;
		texts[right] = "";
		const after = next[right]!;
		next[left] = after;
		if (after >= 0) previous[after] = left;
		consider(previous[left]!, left);
		consider(left, after);
	}
	return texts.filter((text) => text !== "");
}
