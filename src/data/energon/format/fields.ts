/**
 * `field_map` entries such as `txt,json[caption]`, which name the sources of a field of a typed sample (docs/spec/energon.md §1.6).
 * A part with `*`, such as `img*.jpg`, selects all matching parts; this is an extension of Energon's format.
 */
import { FieldAccessError } from "../errors.ts";

/** Alternatives, each a path of a part and then keys or list indices. */
export type FieldAccess = readonly (readonly string[])[];

const option = /^([^[\]]+)((?:\[[^[\]]+\])*)$/;

export function parseFieldAccess(text: string): FieldAccess {
	return text.split(",").map((alternative) => {
		const match = option.exec(alternative);
		if (!match) return [text];
		return [match[1]!, ...(match[2]!.match(/[^[\]]+/g) ?? [])];
	});
}

/** Whether a part of a `field_map`, perhaps with `*`, matches an extension. */
export function matchesPart(part: string, extension: string): boolean {
	if (!part.includes("*")) return part === extension;
	const pieces = part.split("*");
	const [first, last] = [pieces[0]!, pieces.at(-1)!];
	if (extension.length < first.length + last.length || !extension.startsWith(first)) return false;
	let at = first.length;
	for (const piece of pieces.slice(1, -1)) {
		const found = extension.indexOf(piece, at);
		if (found < 0) return false;
		at = found + piece.length;
	}
	return extension.length - last.length >= at && extension.endsWith(last);
}

/** The value of the first alternative that the sample has. Throws a FieldAccessError if it has no alternative. */
export function accessField(parts: Readonly<Record<string, unknown>>, access: FieldAccess, key: string): unknown {
	for (const path of access) {
		const found = follow(parts, path);
		if (found !== undefined) return found.value;
	}
	const wanted = access.map(([part, ...inner]) => part + inner.map((name) => `[${name}]`).join("")).join(" or ");
	throw new FieldAccessError(`Sample ${key} has no ${wanted}; it has ${Object.keys(parts).join(", ")}.`, key);
}

function follow(root: unknown, path: readonly string[]): { value: unknown } | undefined {
	const [part, ...steps] = path;
	if (part?.includes("*") && steps.length === 0 && isRecord(root)) {
		const names = Object.keys(root).filter((name) => matchesPart(part, name));
		if (names.length === 0) return undefined;
		names.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
		return { value: names.map((name) => root[name]) };
	}
	let value = root;
	for (const step of path) {
		if (Array.isArray(value)) {
			const index = /^[+-]?\d+$/.test(step) ? Number(step) : Number.NaN;
			value = value[index < 0 ? value.length + index : index];
			if (value === undefined) return undefined;
		} else if (isRecord(value) && Object.hasOwn(value, step)) {
			value = value[step];
		} else {
			return undefined;
		}
	}
	return { value };
}

/** Whether a value has fields; undecoded bytes have no fields. */
function isRecord(value: unknown): value is Record<string, unknown> {
	return value !== null && typeof value === "object" && !ArrayBuffer.isView(value);
}
