/** Brace patterns of shard lists: expansion as bash and Energon do it, and its inverse for files we write. */
import { UserError } from "../../../native/errors.ts";

/** More names than this from one pattern are a mistake. */
const MOST_NAMES = 10_000_000;

/** The names a pattern stands for, in order: `{000..123}`, `{a,b}`, steps, nesting, backslash escapes. */
export function expandBraces(pattern: string): string[] {
	return expandSequence(pattern, pattern).map((name) => name.replace(/\\(.)/gs, "$1"));
}

function expandSequence(text: string, whole: string): string[] {
	let names = [""];
	const append = (parts: readonly string[]): void => {
		if (names.length * parts.length > MOST_NAMES) throw new UserError(`The shard pattern ${whole} has too many names.`);
		names = names.flatMap((name) => parts.map((part) => name + part));
	};
	let depth = 0;
	let start = 0;
	for (let i = 0; i < text.length; i++) {
		if (text[i] === "\\") {
			i++;
		} else if (text[i] === "{") {
			if (depth++ === 0) {
				append([text.slice(start, i)]);
				start = i + 1;
			}
		} else if (text[i] === "}") {
			if (--depth < 0) break;
			if (depth === 0) {
				append(expandExpression(text.slice(start, i), whole));
				start = i + 1;
			}
		}
	}
	if (depth !== 0) throw new UserError(`The shard pattern ${whole} has unbalanced braces.`);
	append([text.slice(start)]);
	return names;
}

function expandExpression(text: string, whole: string): string[] {
	const integers = /^(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?$/.exec(text);
	if (integers) return integerRange(integers[1]!, integers[2]!, integers[3], whole);
	const letters = /^([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?$/.exec(text);
	if (letters) return letterRange(letters[1]!, letters[2]!, letters[3]);
	const items = splitAtCommas(text);
	if (items.length > 1) return items.flatMap((item) => expandSequence(item, whole));
	return expandSequence(text, whole).map((name) => `{${name}}`);
}

function splitAtCommas(text: string): string[] {
	const items: string[] = [];
	let depth = 0;
	let start = 0;
	for (let i = 0; i < text.length; i++) {
		if (text[i] === "\\") i++;
		else if (text[i] === "{") depth++;
		else if (text[i] === "}") depth--;
		else if (text[i] === "," && depth === 0) {
			items.push(text.slice(start, i));
			start = i + 1;
		}
	}
	items.push(text.slice(start));
	return items;
}

function integerRange(from: string, to: string, step: string | undefined, whole: string): string[] {
	const padded = [from, to].some((bound) => bound !== "0" && bound !== "-0" && /^-?0/.test(bound));
	const width = padded ? Math.max(from.length, to.length) : 0;
	const first = Number(from);
	const last = Number(to);
	const increment = (Number(step ?? 1) || 1) * (first < last ? 1 : -1);
	const count = Math.floor((last - first) / increment) + 1;
	if (count > MOST_NAMES) throw new UserError(`The shard pattern ${whole} has too many names.`);
	return Array.from({ length: count }, (_, i) => {
		const value = first + i * increment;
		const digits = String(Math.abs(value));
		return value < 0 ? `-${digits.padStart(width - 1, "0")}` : digits.padStart(width, "0");
	});
}

function letterRange(from: string, to: string, step: string | undefined): string[] {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
	const first = alphabet.indexOf(from);
	const last = alphabet.indexOf(to);
	const increment = (Number(step ?? 1) || 1) * (first < last ? 1 : -1);
	return Array.from({ length: Math.floor((last - first) / increment) + 1 }, (_, i) => alphabet[first + i * increment]!);
}

interface Numbers {
	/** Text between the numbers, one piece more than there are numbers. */
	readonly literals: readonly string[];
	readonly numbers: readonly string[];
}

function tokenize(name: string): Numbers {
	return { literals: name.split(/\d+/), numbers: name.match(/\d+/g) ?? [] };
}

/** Names as patterns, keeping their order: runs in which one number of equal width counts up become a range. */
export function collapseBraces(names: readonly string[]): string[] {
	const patterns: string[] = [];
	for (let i = 0; i < names.length; ) {
		const first = tokenize(names[i]!);
		let last = first;
		let slot = -1;
		let end = i + 1;
		for (; end < names.length; end++) {
			const next = tokenize(names[end]!);
			const changed = countingSlot(last, next);
			if (changed < 0 || (slot >= 0 && changed !== slot)) break;
			slot = changed;
			last = next;
		}
		if (slot < 0) {
			patterns.push(names[i]!);
		} else {
			const parts = first.numbers.map((number, k) => (k === slot ? `{${number}..${last.numbers[slot]}}` : number));
			patterns.push(first.literals.map((literal, k) => literal + (parts[k] ?? "")).join(""));
		}
		i = end;
	}
	return patterns;
}

/** The one number that is one higher in `next`, same width; -1 if the names differ in any other way. */
function countingSlot(previous: Numbers, next: Numbers): number {
	if (previous.numbers.length !== next.numbers.length) return -1;
	if (previous.literals.some((literal, k) => literal !== next.literals[k])) return -1;
	const changed = previous.numbers.flatMap((number, k) => (Number(number) === Number(next.numbers[k]) ? [] : [k]));
	if (changed.length !== 1) return -1;
	const slot = changed[0]!;
	const [before, after] = [previous.numbers[slot]!, next.numbers[slot]!];
	return before.length === after.length && Number(after) === Number(before) + 1 ? slot : -1;
}
