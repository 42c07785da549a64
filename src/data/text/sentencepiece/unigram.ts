/**
 * The Unigram model of SentencePiece: the division of a text into pieces with the largest sum of scores. Sums are rounded to fp32
 * after each piece, as in SentencePiece, so that equal and nearly equal divisions are decided alike.
 */

import type { SentencePiece } from "./model-file.ts";

/** What a character that is no piece scores below the worst piece. */
const UNKNOWN_PENALTY = 10;

export class Unigram {
	/** Node of the tree of pieces by node and UTF-16 code unit: node * 2^16 + unit. */
	readonly #next = new Map<number, number>();
	/** Id of the piece that ends at a node; -1: none does. */
	readonly #ids: number[] = [-1];
	/** Scores by id: fp32. */
	readonly #scores: Float32Array;
	readonly #unknownScore: number;

	constructor(
		pieces: readonly SentencePiece[],
		private readonly unknownId: number,
	) {
		const scores = pieces.filter(({ type }) => type === "normal").map(({ score }) => score);
		const least = scores.reduce((a, b) => Math.min(a, b), Infinity);
		const most = scores.reduce((a, b) => Math.max(a, b), -Infinity);
		this.#unknownScore = Math.fround(least - UNKNOWN_PENALTY);
		this.#scores = Float32Array.from(pieces, ({ text, score, type }) =>
			type === "user" ? Math.fround(Buffer.byteLength(text) * most) - 0.1 : score,
		);
		for (const [id, { text, type }] of pieces.entries()) {
			if (type === "normal" || type === "user") this.#ids[this.#nodeOf(text)] = id;
		}
	}

	/** Ids of a normalized text; the unknown id for each character that is in no piece. */
	encode(text: string): number[] {
		const size = text.length;
		const best = new Float32Array(size + 1);
		const startOf = new Int32Array(size + 1).fill(-1);
		const idAt = new Int32Array(size + 1);
		const offer = (end: number, sum: number, start: number, id: number) => {
			const score = Math.fround(sum);
			if (startOf[end] !== -1 && score <= best[end]!) return;
			best[end] = score;
			startOf[end] = start;
			idAt[end] = id;
		};
		for (let start = 0, width = 1; start < size; start += width) {
			width = text.codePointAt(start)! > 0xffff ? 2 : 1;
			let isCovered = false;
			let node: number | undefined = 0;
			for (let end = start; end < size; ) {
				node = this.#next.get(node * 0x10000 + text.charCodeAt(end++));
				if (node === undefined) break;
				const id = this.#ids[node]!;
				if (id < 0) continue;
				offer(end, best[start]! + this.#scores[id]!, start, id);
				if (end === start + width) isCovered = true;
			}
			if (!isCovered) offer(start + width, best[start]! + this.#unknownScore, start, this.unknownId);
		}
		const ids: number[] = [];
		for (let end = size; end > 0; end = startOf[end]!) ids.push(idAt[end]!);
		return ids.reverse();
	}

	#nodeOf(text: string): number {
		let node = 0;
		for (let i = 0; i < text.length; i++) {
			const key = node * 0x10000 + text.charCodeAt(i);
			let next = this.#next.get(key);
			if (next === undefined) {
				next = this.#ids.push(-1) - 1;
				this.#next.set(key, next);
			}
			node = next;
		}
		return node;
	}
}
