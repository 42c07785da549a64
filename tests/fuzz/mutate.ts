/**
 * Mutations of valid inputs: bits, bytes, cuts, repeats, splices, length fields, numbers in text, dictionary tokens, and
 * whole values of JSON. A case is a function of the seed and its number, so that any one can be made again.
 */
import { generator, type Random } from "../damage.ts";
import { type JsonSpans, jsonSpans, type Span, withComma } from "./json-spans.ts";
import type { FuzzTarget } from "./parser.ts";

/** Numbers at which sizes, counts and offsets go wrong. */
const numbers: readonly bigint[] = [
	...[0n, 1n, 2n, 7n, 8n, 127n, 128n, 255n, 256n, 32767n, 32768n, 65535n, 65536n, 1n << 20n, 1n << 26n],
	...[(1n << 31n) - 1n, 1n << 31n, (1n << 32n) - 1n, 1n << 32n, 1n << 40n, (1n << 53n) - 1n, 1n << 53n],
	...[(1n << 63n) - 1n, 1n << 63n, (1n << 64n) - 1n, -1n, -2n, -(1n << 31n), -(1n << 63n)],
];
const texts = [...numbers.map(String), "0.5", "1e999", "-0", "1e-400", "NaN", "Infinity", "00", "0x10", "1_000"];
const strangeValues = [
	...["null", "true", "[]", "{}", '""', '"../x"', '"a\\u0000b"', "[[0]]", '{"a":1}', "[null,null]", '"\\ud800"'],
	...['"/etc/passwd"', '{"__proto__":{"a":1}}', "-1", "0.5", "1e308", "9007199254740993", '"\\u001b[31m"', "0"],
];
const strangeKeys = ['"__proto__"', '"constructor"', '"toString"', '""', '"a"', '"0"', '"length"', '"__class__"'];
const brackets = ["[", "{", '{"a":', "("];

const ascii = new TextEncoder();
const encodeAll = (list: readonly string[]) => list.map((text) => ascii.encode(text));
const [numberTexts, valueTexts, keyTexts, openTexts] = [texts, strangeValues, strangeKeys, brackets].map(encodeAll) as [
	Uint8Array[],
	Uint8Array[],
	Uint8Array[],
	Uint8Array[],
];

/** Inputs do not grow beyond this. */
const LARGEST = 2 ** 17;

export class Mutator {
	readonly #seeds: readonly { readonly bytes: Uint8Array; readonly spans: JsonSpans | null }[];
	readonly #dictionary: readonly Uint8Array[];
	readonly #repair: FuzzTarget["repair"];
	readonly #work = new Uint8Array(LARGEST);
	#length = 0;

	constructor(target: Pick<FuzzTarget, "seeds" | "dictionary" | "json" | "repair">) {
		this.#seeds = target.seeds.map((bytes) => ({ bytes, spans: target.json ? jsonSpans(bytes) : null }));
		this.#dictionary = (target.dictionary ?? []).map((token) =>
			typeof token === "string" ? ascii.encode(token) : token,
		);
		this.#repair = target.repair;
	}

	/** Input number `index` of a seed. */
	input(seed: number, index: number): Uint8Array {
		const random = generator(Math.imul(seed, 0x9e3779b1) ^ Math.imul(index + 1, 0x85ebca6b) ^ (index / 2 ** 32));
		const { bytes, spans } = this.#pick(this.#seeds, random);
		this.#length = 0;
		this.#replace(0, 0, bytes);
		if (this.#dictionary.length > 0 && random(16) === 0) this.#soup(random);
		else {
			const structured = spans !== null && random(4) !== 0;
			if (structured) this.#exchange(bytes, spans, random);
			if (!structured || random(4) === 0) for (let n = 1 + random(4); n > 0; n--) this.#damage(random);
		}
		const made = this.#work.slice(0, this.#length);
		return this.#repair && random(2) === 0 ? this.#repair(made) : made;
	}

	#pick<T>(list: readonly T[], random: Random): T {
		return list[random(list.length)]!;
	}

	/** Puts `bytes` in the place of [begin, end); a result that would be too long is cut. */
	#replace(begin: number, end: number, bytes: Uint8Array): void {
		const room = LARGEST - begin;
		const part = bytes.length > room ? bytes.subarray(0, room) : bytes;
		const kept = Math.min(this.#length - end, room - part.length);
		this.#work.copyWithin(begin + part.length, end, end + kept);
		this.#work.set(part, begin);
		this.#length = begin + part.length + kept;
	}

	/** A sequence of tokens. */
	#soup(random: Random): void {
		if (random(2) === 0) this.#length = 0;
		for (let n = 1 + random(24); n > 0; n--) {
			const token = this.#pick(this.#dictionary, random);
			this.#replace(this.#length, this.#length, random(4) === 0 ? Uint8Array.of(random(256)) : token);
		}
	}

	#damage(random: Random): void {
		const work = this.#work;
		const length = this.#length;
		if (length === 0) return;
		const at = random(length);
		switch (random(12)) {
			case 0:
				work[at]! ^= 1 << random(8);
				break;
			case 1:
				work[at] = random(256);
				break;
			case 2:
				work.fill([0, 0xff, 0x7f, 0x80][random(4)]!, at, Math.min(length, at + 1 + random(8)));
				break;
			case 3:
				this.#length = at;
				break;
			case 4:
				this.#replace(at, Math.min(length, at + 1 + random(16)), new Uint8Array(0));
				break;
			case 5: {
				const from = random(length);
				this.#replace(at, at, work.slice(from, Math.min(length, from + 1 + random(32))));
				break;
			}
			case 6:
				this.#replace(at, at, Uint8Array.of(random(256)));
				break;
			case 7:
			case 8:
				this.#writeNumber(at, random);
				break;
			case 9: {
				const other = this.#pick(this.#seeds, random).bytes;
				const from = random(Math.max(1, other.length));
				this.#replace(at, random(2) ? at : length, other.subarray(from, from + 1 + random(other.length)));
				break;
			}
			case 10:
				this.#writeDigits(at, random);
				break;
			default: {
				const known = this.#dictionary.length > 0 ? this.#dictionary : openTexts;
				const token = this.#pick(known, random);
				const repeated = random(32) === 0 ? repeat(token, 1 + random(4096)) : token;
				this.#replace(at, random(2) ? at : Math.min(length, at + token.length), repeated);
			}
		}
	}

	/** A length field of 1, 2, 4 or 8 bytes: another number, or a little more or less. */
	#writeNumber(at: number, random: Random): void {
		const width = 1 << random(4);
		const begin = random(2) ? at - (at % width) : at;
		if (begin + width > this.#length) return;
		const view = new DataView(this.#work.buffer, begin, width);
		const little = random(4) !== 0;
		let value = random(8) === 0 ? BigInt(this.#length) : this.#pick(numbers, random);
		if (random(3) === 0) {
			value = 0n;
			for (let i = 0; i < width; i++) value = (value << 8n) | BigInt(view.getUint8(little ? width - 1 - i : i));
			value += BigInt(random(17) - 8);
		}
		for (let i = 0; i < width; i++) view.setUint8(little ? i : width - 1 - i, Number((value >> BigInt(8 * i)) & 255n));
	}

	/** The next run of decimal digits: another number. */
	#writeDigits(at: number, random: Random): void {
		const isDigit = (byte: number) => byte >= 0x30 && byte <= 0x39;
		let begin = at;
		while (begin < this.#length && !isDigit(this.#work[begin]!)) begin++;
		let end = begin;
		while (end < this.#length && isDigit(this.#work[end]!)) end++;
		if (end > begin) this.#replace(begin, end, this.#pick(numberTexts, random));
	}

	/** One to three values, elements or keys of a JSON seed, the last in the text first. */
	#exchange(text: Uint8Array, spans: JsonSpans, random: Random): void {
		const edits: { readonly span: Span; readonly bytes: Uint8Array }[] = [];
		for (let n = 1 + random(3); n > 0; n--) edits.push(this.#edit(text, spans, random));
		edits.sort((a, b) => b.span.begin - a.span.begin);
		let before = Number.POSITIVE_INFINITY;
		for (const { span, bytes } of edits) {
			if (span.end > before) continue;
			this.#replace(span.begin, span.end, bytes);
			before = span.begin;
		}
	}

	#edit(text: Uint8Array, spans: JsonSpans, random: Random): { readonly span: Span; readonly bytes: Uint8Array } {
		const value = this.#pick(spans.values, random);
		const copyOf = ({ begin, end }: Span) => text.subarray(begin, end);
		switch (random(8)) {
			case 0:
			case 1:
				return { span: value, bytes: this.#pick(valueTexts, random) };
			case 2:
				return { span: value, bytes: this.#pick(numberTexts, random) };
			case 3:
				return { span: value, bytes: copyOf(this.#pick(spans.values, random)) };
			case 4: {
				if (spans.elements.length === 0) break;
				return { span: withComma(text, this.#pick(spans.elements, random)), bytes: new Uint8Array(0) };
			}
			case 5: {
				if (spans.elements.length === 0) break;
				const element = this.#pick(spans.elements, random);
				const bytes = repeat(join(copyOf(element), ascii.encode(",")), 1 + random(4));
				return { span: { begin: element.begin, end: element.begin }, bytes };
			}
			case 6: {
				if (spans.keys.length === 0) break;
				const key = random(3) ? copyOf(this.#pick(spans.keys, random)) : this.#pick(keyTexts, random);
				return { span: this.#pick(spans.keys, random), bytes: key };
			}
			default: {
				const depth = 1 + random(random(64) === 0 ? 8192 : 40);
				const [open, close] = random(2) ? ["[", "]"] : ['{"a":', "}"];
				const around = (bracket: string) => repeat(ascii.encode(bracket), depth);
				return { span: value, bytes: join(around(open!), copyOf(value), around(close!)) };
			}
		}
		return { span: value, bytes: this.#pick(valueTexts, random) };
	}
}

function join(...parts: readonly Uint8Array[]): Uint8Array {
	return new Uint8Array(Buffer.concat(parts));
}

function repeat(bytes: Uint8Array, times: number): Uint8Array {
	const result = new Uint8Array(bytes.length * times);
	for (let i = 0; i < times; i++) result.set(bytes, i * bytes.length);
	return result;
}
