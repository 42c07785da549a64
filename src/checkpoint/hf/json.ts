/**
 * JSON as Python writes it: Infinity, -Infinity and NaN stand bare (older transformers) or as {"__float__": "Infinity"}
 * (newer). Both are read as numbers and written in the newer form.
 */
import { UserError } from "../../system/errors.ts";
import { rawJson } from "../../system/json.ts";

const specials: Readonly<Record<string, number>> = {
	Infinity: Number.POSITIVE_INFINITY,
	"-Infinity": Number.NEGATIVE_INFINITY,
	NaN: Number.NaN,
};

/** Parses a JSON object; `path` is for the error. */
export function parsePythonJson(text: string, path: string): Record<string, unknown> {
	return parse(text, path, (value) => value);
}

/**
 * Parses JSON whose values are written again and not computed with: a whole number that is spelled as a float, such as 0.0,
 * stays a float for Python, and keys that are numbers, such as those of id2label, stay where they are.
 */
export function parseKeepingFloats(text: string, path: string): Record<string, unknown> {
	// JavaScript sorts keys that are numbers, before all others.
	const marked = text.replace(/"(?:[^"\\]|\\.)*"(?:\s*:)?/g, (token) => token.replace(/^"(?=\d+"\s*:$)/, '"\\u0000'));
	return parse(marked, path, (value, source) =>
		Number.isInteger(value) && /[.eE]/.test(source) ? pythonFloat(value) : value,
	);
}

function parse(text: string, path: string, numberOf: (value: number, source: string) => unknown) {
	// Strings are matched first, so that words inside them stay.
	const plain = text.replace(/"(?:[^"\\]|\\.)*"|-?\bInfinity\b|\bNaN\b/g, (token) =>
		token.startsWith('"') ? token : JSON.stringify({ __float__: token }),
	);
	let value: unknown;
	try {
		// The third argument is standard since 2025, not yet in TypeScript's library.
		const revive = (_: string, entry: unknown, context?: { readonly source?: string }): unknown => {
			if (typeof entry === "number") return numberOf(entry, context?.source ?? "");
			const special = (entry as { readonly __float__?: unknown } | null)?.__float__;
			return typeof special === "string" && Object.hasOwn(specials, special) ? specials[special] : entry;
		};
		value = JSON.parse(plain, revive as Parameters<typeof JSON.parse>[1]);
	} catch (error) {
		throw new UserError(`${path} is not JSON: ${(error as Error).message}.`);
	}
	if (typeof value !== "object" || value === null || Array.isArray(value)) {
		throw new UserError(`${path} is not a JSON object.`);
	}
	return value as Record<string, unknown>;
}

/** A number that Python reads as a float: 0 is written 0.0, since transformers checks the types of its fields. */
export function pythonFloat(value: number): unknown {
	if (!Number.isInteger(value)) return value;
	return rawJson(value.toFixed(1));
}

/** Two-space indent and a newline at the end, as transformers writes config.json. */
export function formatPythonJson(value: unknown): string {
	const text = JSON.stringify(
		value,
		(_, entry) => (typeof entry === "number" && !Number.isFinite(entry) ? { __float__: String(entry) } : entry),
		2,
	);
	return `${text.replace(/^( *")\\u0000(?=\d+": )/gm, "$1")}\n`;
}
