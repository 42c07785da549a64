/** Where the values, elements and keys of a JSON text lie, so that a mutation exchanges whole ones. */

export interface Span {
	readonly begin: number;
	readonly end: number;
}

export interface JsonSpans {
	readonly values: readonly Span[];
	/** Elements of arrays and members of objects (with their keys). */
	readonly elements: readonly Span[];
	/** Strings that are keys, with their quotes. */
	readonly keys: readonly Span[];
}

const [quote, backslash, comma, colon] = [0x22, 0x5c, 0x2c, 0x3a];
const isSpace = (byte: number | undefined) => byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09;

/** Spans of a valid JSON text, in bytes; null where it is not valid. */
export function jsonSpans(text: Uint8Array): JsonSpans | null {
	try {
		JSON.parse(new TextDecoder().decode(text));
	} catch {
		return null;
	}
	const spans = { values: [] as Span[], elements: [] as Span[], keys: [] as Span[] };
	let at = 0;
	const skipSpace = () => {
		while (isSpace(text[at])) at++;
	};
	const string = () => {
		at++;
		while (text[at] !== quote) at += text[at] === backslash ? 2 : 1;
		at++;
	};
	const elements = (close: number, element: () => void) => {
		at++;
		skipSpace();
		while (text[at] !== close) {
			const begin = at;
			element();
			spans.elements.push({ begin, end: at });
			skipSpace();
			if (text[at] === comma) at++;
			skipSpace();
		}
		at++;
	};
	const value = () => {
		skipSpace();
		const begin = at;
		if (text[at] === quote) string();
		else if (text[at] === 0x5b) elements(0x5d, value);
		else if (text[at] === 0x7b) {
			elements(0x7d, () => {
				const key = at;
				string();
				spans.keys.push({ begin: key, end: at });
				skipSpace();
				if (text[at] === colon) at++;
				value();
			});
		} else while (at < text.length && !isSpace(text[at]) && ![comma, 0x5d, 0x7d].includes(text[at]!)) at++;
		spans.values.push({ begin, end: at });
	};
	value();
	return spans;
}

/** An element with the comma that goes with it. */
export function withComma(text: Uint8Array, { begin, end }: Span): Span {
	let after = end;
	while (isSpace(text[after])) after++;
	if (text[after] === comma) return { begin, end: after + 1 };
	let before = begin;
	while (isSpace(text[before - 1])) before--;
	return text[before - 1] === comma ? { begin: before - 1, end } : { begin, end };
}
