/** Tokenizers of SentencePiece: Unigram, BPE and character models, with the ids that the library gives. */
import { UserError } from "../../../system/errors.ts";
import { readWholeFile } from "../../../system/input-file.ts";
import { tokenizerLimits } from "../../../system/json.ts";
import { mergeByRank } from "../byte-pairs.ts";
import { pieceTokenizer, TextTrie } from "../piece-tokenizer.ts";
import type { Tokenizer } from "../tokenizer.ts";
import { type ModelFile, type Normalization, parseModelFile, type SentencePiece } from "./model-file.ts";

/** Words whose pieces are remembered. */
const MOST_WORDS = 2 ** 16;

export interface SentencePieceOptions {
	/**
	 * Tokens that are recognised in text too, those that the model lacks with ids behind its own (Megatron's
	 * tokenizer-sentencepiece-legacy); null: no text of a file is special.
	 */
	readonly specialTokens: readonly string[] | null;
}

/** Reads a .model file. Throws a UserError for one that cannot be read. */
export function openSentencePiece(path: string, { specialTokens }: SentencePieceOptions): Tokenizer {
	const bytes = readWholeFile(path, tokenizerLimits.bytes, { called: `the tokenizer file ${path}` });
	const model = new SentencePieceModel(parseModelFile(bytes, path), path);
	const specials = new Map(model.controls);
	let vocabularySize = model.size;
	for (const token of specialTokens ?? []) specials.set(token, model.idOf(token) ?? vocabularySize++);
	const space = model.idOf(SPACE);
	return pieceTokenizer({
		vocabularySize,
		specials,
		recognisesInText: specialTokens !== null,
		endOfDocument: model.end,
		encode: (text, begins) => {
			if (begins || specialTokens === null) return model.encode(text, { begins });
			// Megatron: behind a special token a blank that is a piece of its own is left out.
			const ids = model.encode(text, { begins: true });
			return ids[0] === space ? ids.slice(1) : ids;
		},
		decode: (ids) => model.decode(ids),
		textOf: (id) => model.textOf(id),
	});
}

class SentencePieceModel {
	/** Ids of the pieces that text is made of. */
	readonly #ids = new Map<string, number>();
	/** Ids of the pieces that a text names alone: control symbols, bytes and the unknown. */
	readonly #reserved = new Map<string, number>();
	readonly #unknown: number;
	/** Id of the byte 0 to 255; empty without byte fallback. */
	readonly #bytes: number[] = [];
	readonly #normalizer: Normalizer;
	readonly #segment: (normalized: string) => readonly number[];

	constructor(
		private readonly file: ModelFile,
		path: string,
	) {
		const refuse = (what: string) => new UserError(`${path} is not a SentencePiece model that can be read: ${what}.`);
		const { pieces, type } = file;
		for (const [id, { text, type }] of pieces.entries()) {
			const isText = type === "normal" || type === "user" || type === "unused";
			const ids = isText ? this.#ids : this.#reserved;
			if (ids.has(text)) throw refuse(`the piece ${JSON.stringify(text)} occurs twice`);
			ids.set(text, id);
			if (type === "byte") {
				const [, code] = /^<0x([0-9A-F]{2})>$/.exec(text) ?? [];
				if (code === undefined) throw refuse(`the byte piece ${JSON.stringify(text)} is none`);
				this.#bytes[Number.parseInt(code, 16)] = id;
			}
		}
		if (file.byteFallback && Object.keys(this.#bytes).length !== 256) throw refuse("it has not a piece for every byte");
		if (!file.byteFallback) this.#bytes = [];
		this.#unknown = pieces.findIndex(({ type }) => type === "unknown");
		const symbols = pieces.filter(({ type }) => type === "user").map(({ text }) => text);
		this.#normalizer = new Normalizer(file.normalization, symbols, path);
		if (type === "unigram") {
			const unigram = new Unigram(pieces, this.#unknown);
			this.#segment = (normalized) => unigram.encode(normalized);
		} else if (type === "word") throw refuse("its type is word; unigram, bpe and char can be");
		else {
			if (type === "bpe" && pieces.some(({ type }) => type === "unused")) throw refuse("it has unused pieces");
			this.#segment = this.#mergingSegmenter(new TextTrie(symbols));
		}
	}

	get size(): number {
		return this.file.pieces.length;
	}

	get controls(): readonly (readonly [text: string, id: number])[] {
		return this.file.pieces.flatMap(({ text, type }, id) => (type === "control" ? [[text, id] as const] : []));
	}

	/** The piece that ends a text; null: the model has none. */
	get end(): number | null {
		return this.controls.find(([text]) => text === this.file.endPiece)?.[1] ?? null;
	}

	/** Null where the text is no piece, or the piece of the unknown. */
	idOf(text: string): number | null {
		const id = this.#reserved.get(text) ?? this.#ids.get(text) ?? this.#unknown;
		return id === this.#unknown ? null : id;
	}

	encode(text: string, { begins }: { readonly begins: boolean }): number[] {
		const normalized = this.#normalizer.normalize(text, { begins });
		const ids: number[] = [];
		let at = 0;
		let wasUnknown = false;
		for (const id of this.#segment(normalized)) {
			const isUnknown = id === this.#unknown;
			const character = isUnknown ? String.fromCodePoint(normalized.codePointAt(at)!) : "";
			at += isUnknown ? character.length : this.file.pieces[id]!.text.length;
			if (isUnknown && this.#bytes.length > 0) {
				for (const byte of Buffer.from(character)) ids.push(this.#bytes[byte]!);
			} else if (!(isUnknown && wasUnknown)) ids.push(id);
			wasUnknown = isUnknown;
		}
		return ids;
	}

	decode(ids: readonly number[]): string {
		const { addDummyPrefix, removeExtraWhitespaces } = this.file.normalization;
		let text = "";
		let bytes: number[] = [];
		const flush = () => {
			text += Buffer.from(bytes).toString();
			bytes = [];
		};
		let begins = addDummyPrefix || removeExtraWhitespaces;
		for (const id of ids) {
			const piece = this.file.pieces[id];
			if (piece === undefined) continue;
			if (piece.type === "byte") {
				bytes.push(Number.parseInt(piece.text.slice(3, 5), 16));
				continue;
			}
			flush();
			const { unknownSurface } = this.file;
			if (begins && text === "" && piece.text.startsWith(SPACE)) {
				text += piece.text.slice(1).replaceAll(SPACE, " ");
				begins = removeExtraWhitespaces;
			} else text += piece.type === "unknown" ? unknownSurface : piece.text.replaceAll(SPACE, " ");
		}
		flush();
		return text;
	}

	textOf(id: number): string | null {
		const piece = this.file.pieces[id];
		return piece === undefined || piece.type === "unknown" || piece.type === "user" ? null : piece.text;
	}

	/** Pieces by merging characters: of a BPE model in the order of scores, of a character model none. */
	#mergingSegmenter(symbols: TextTrie): (normalized: string) => number[] {
		const { pieces, type } = this.file;
		const scoreOf = (text: string) => {
			const id = this.#ids.get(text);
			return id === undefined ? undefined : -pieces[id]!.score;
		};
		// Where no piece goes over from text to a blank, a blank that follows text begins a word of its own.
		const spansWords = pieces.some(({ text, type }) => type === "normal" && /[^\u2581]\u2581/.test(text));
		const words = spansWords ? /.+/gsu : /\u2581*[^\u2581]+|\u2581+/gu;
		const remembered = new Map<string, readonly number[]>();
		const idsOf = (word: string) => {
			const known = remembered.get(word);
			if (known !== undefined) return known;
			const merged = type === "char" ? [...word] : mergeByRank([...word], scoreOf);
			const ids = merged.map((text) => this.#ids.get(text) ?? this.#unknown);
			if (remembered.size >= MOST_WORDS) remembered.clear();
			remembered.set(word, ids);
			return ids;
		};
		return (normalized) => {
			const ids: number[] = [];
			for (const { text, isFound } of symbols.cut(normalized)) {
				if (isFound) ids.push(this.#ids.get(text)!);
				else for (const [word] of text.matchAll(words)) for (const id of idsOf(word)) ids.push(id);
			}
			return ids;
		};
	}
}

// The Unigram model of SentencePiece: the division of a text into pieces with the largest sum of scores. Sums are rounded to fp32
// after each piece, as in SentencePiece, so that equal and nearly equal divisions are decided alike.

/** How far below the worst piece a character scores that is no piece. */
const UNKNOWN_PENALTY = 10;

class Unigram {
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

// Normalization of SentencePiece: rules of replacement, the longest first, and blanks. It works on UTF-8, as the rules do.

const [BLANK, TEXT_END] = [0x20, 0];
/** U+2581, which stands for a blank in pieces. */
const SPACE = "\u2581";

/** The rules of a charsmap: little-endian u32 size of a double array (Darts), the array, and texts that end in a zero byte. */
class ReplacementRules {
	readonly #units: Uint32Array;
	readonly #texts: Uint8Array;

	constructor(charsMap: Uint8Array, path: string) {
		const view = new DataView(charsMap.buffer, charsMap.byteOffset, charsMap.byteLength);
		const size = charsMap.byteLength < 4 ? 0 : view.getUint32(0, true);
		if (size < 4 || size % 4 !== 0 || 4 + size > charsMap.byteLength) {
			throw new UserError(`${path} is not a SentencePiece model: its rules of normalization are damaged.`);
		}
		this.#units = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
		this.#texts = charsMap.subarray(4 + size);
	}

	/** The longest rule that matches the text from byte `at`: bytes replaced, and their replacement; null: no rule matches. */
	longestAt(text: Uint8Array, at: number): { readonly length: number; readonly by: Uint8Array } | null {
		const offset = (unit: number) => (unit >>> 10) << ((unit & 0x200) >>> 6);
		let node = offset(this.#units[0]!);
		let [length, value] = [0, 0];
		for (let i = at; i < text.length; i++) {
			node ^= text[i]!;
			const unit = this.#units[node];
			if (unit === undefined || (unit & 0x800000ff) !== text[i]) break;
			node ^= offset(unit);
			if (((unit >>> 8) & 1) === 1) [length, value] = [i + 1 - at, (this.#units[node] ?? 0) & 0x7fffffff];
		}
		if (length === 0) return null;
		const end = this.#texts.indexOf(TEXT_END, value);
		return { length, by: this.#texts.subarray(value, end < 0 ? this.#texts.length : end) };
	}
}

/** Bytes of the UTF-8 character that begins with a byte. */
function characterLength(byte: number): number {
	return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

class Normalizer {
	readonly #rules: ReplacementRules | null;
	/** Texts that no rule changes, with a character for each byte; null: the model has no such text. */
	readonly #symbols: TextTrie | null;
	readonly #options: Normalization;
	readonly #space: Uint8Array;

	/** `symbols`: texts that no rule changes. */
	constructor(options: Normalization, symbols: readonly string[], path: string) {
		this.#options = options;
		this.#rules = options.charsMap.length === 0 ? null : new ReplacementRules(options.charsMap, path);
		const asBytes = symbols.map((symbol) => Buffer.from(symbol).toString("latin1"));
		this.#symbols = symbols.length === 0 ? null : new TextTrie(asBytes);
		this.#space = Buffer.from(options.escapeWhitespaces ? SPACE : " ");
	}

	/** `begins`: the text gets the dummy prefix. */
	normalize(text: string, { begins }: { readonly begins: boolean }): string {
		const { removeExtraWhitespaces, whitespaceAsSuffix } = this.#options;
		const bytes = Buffer.from(text);
		const characters = this.#symbols === null ? "" : bytes.toString("latin1");
		const out = new Bytes(text.length);
		let at = 0;
		/** The bytes that stand for the symbol, rule or character at the place, which moves behind it. */
		const next = (): Uint8Array => {
			const symbol = this.#symbols === null ? 0 : this.#symbols.endAt(characters, at) - at;
			const rule = symbol > 0 ? null : (this.#rules?.longestAt(bytes, at) ?? null);
			const from = at;
			at += rule?.length ?? (symbol > 0 ? symbol : characterLength(bytes[at]!));
			return rule?.by ?? bytes.subarray(from, at);
		};
		if (removeExtraWhitespaces) {
			for (let from = at; at < bytes.length; from = at) {
				const first = next();
				if (first.length === 1 && first[0] === BLANK) continue;
				at = from;
				break;
			}
		}
		if (at === bytes.length) return "";
		const addsSpace = this.#options.addDummyPrefix && begins;
		if (addsSpace && !whitespaceAsSuffix) out.append(this.#space);
		let afterBlank = removeExtraWhitespaces;
		while (at < bytes.length) {
			const written = next();
			let from = 0;
			while (afterBlank && written[from] === BLANK) from++;
			for (let i = from; i < written.length; i++) {
				if (written[i] === BLANK) out.append(this.#space);
				else out.push(written[i]!);
			}
			if (from < written.length) afterBlank = removeExtraWhitespaces && written.at(-1) === BLANK;
		}
		if (removeExtraWhitespaces) out.trimEnd(this.#space);
		if (addsSpace && whitespaceAsSuffix) out.append(this.#space);
		return out.text();
	}
}

/** Bytes that grow. */
class Bytes {
	#bytes: Uint8Array;
	#length = 0;

	constructor(expected: number) {
		this.#bytes = new Uint8Array(64 + 2 * expected);
	}

	push(byte: number): void {
		if (this.#length === this.#bytes.length) {
			const grown = new Uint8Array(2 * this.#bytes.length);
			grown.set(this.#bytes);
			this.#bytes = grown;
		}
		this.#bytes[this.#length++] = byte;
	}

	append(bytes: Uint8Array): void {
		for (const byte of bytes) this.push(byte);
	}

	trimEnd(ending: Uint8Array): void {
		const ends = () => ending.every((byte, i) => this.#bytes[this.#length - ending.length + i] === byte);
		while (this.#length >= ending.length && ends()) this.#length -= ending.length;
	}

	text(): string {
		return Buffer.from(this.#bytes.buffer, 0, this.#length).toString();
	}
}
