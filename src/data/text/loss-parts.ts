/** Tokenises text whose parts are or are not in the loss; each token is marked accordingly. */
import type { TextPart, Tokenizer } from "./tokenizer.ts";

/** A part of a text, and whether it is in the loss. */
export interface CountedPart extends TextPart {
	readonly loss: boolean;
}

export interface CountedTokens {
	/** [T]. */
	readonly ids: Int32Array;
	/** 1 where a token counts; [T]. */
	readonly loss: Uint8Array;
}

/** Tokenises the parts as one text. A token that spans parts is in the loss if any of them is. */
export function encodeCounted(tokenizer: Tokenizer, parts: readonly CountedPart[]): CountedTokens {
	const ids = tokenizer.encodeParts(parts);
	const loss = new Uint8Array(ids.length);
	const runs = runsOf(parts);
	if (runs.length <= 1) return { ids, loss: loss.fill(runs[0]?.[0]?.loss ? 1 : 0) };
	const places = new TokenPlaces(tokenizer, ids);
	let [begin, known, characters] = [0, true, 0];
	for (const run of runs) {
		// Where a run has the same tokens alone, its border is a border of tokens: nearly always.
		const alone = known ? tokenizer.encodeParts(run) : null;
		characters += run.reduce((sum, { text }) => sum + text.length, 0);
		const exact = alone?.every((id, i) => id === ids[begin + i]) ?? false;
		const end = exact ? begin + alone!.length : places.tokensUpTo(characters);
		if (run[0]!.loss) loss.fill(1, begin, end);
		known = exact || places.endsAt(end, characters);
		// The next run begins within the token that this one ends in.
		begin = known ? end : Math.max(0, end - 1);
	}
	return { ids, loss };
}

/** Parts that follow each other and count alike. */
function runsOf(parts: readonly CountedPart[]): CountedPart[][] {
	const runs: CountedPart[][] = [];
	for (const part of parts) {
		const last = runs.at(-1);
		if (part.text === "") continue;
		if (last?.[0]?.loss === part.loss) last.push(part);
		else runs.push([part]);
	}
	return runs;
}

/** Where tokens are in the text that they decode to. */
class TokenPlaces {
	constructor(
		private readonly tokenizer: Tokenizer,
		private readonly ids: Int32Array,
	) {}

	/** The fewest tokens that reach to a character. */
	tokensUpTo(character: number): number {
		let [low, high] = [0, this.ids.length];
		while (low < high) {
			const middle = (low + high) >> 1;
			if (this.#characters(middle) >= character) high = middle;
			else low = middle + 1;
		}
		return low;
	}

	endsAt(token: number, character: number): boolean {
		return this.#characters(token) === character;
	}

	#characters(tokens: number): number {
		return tokens === 0 ? 0 : this.tokenizer.decode(this.ids.subarray(0, tokens)).length;
	}
}
