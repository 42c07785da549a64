/**
 * Normalization of SentencePiece: rules of replacement, the longest first, and blanks. It works on UTF-8, as the rules do.
 */
import { UserError } from "../../../system/errors.ts";
import { TextTrie } from "../text-trie.ts";
import type { Normalization } from "./model-file.ts";

const [BLANK, TEXT_END] = [0x20, 0];
/** U+2581, which stands for a blank in pieces. */
export const SPACE = "\u2581";

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

export class Normalizer {
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
