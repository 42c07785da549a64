/** A YAML configuration file → configuration entries with line numbers. Flat: one key a line. */
import { readFileSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { isAlias, isMap, isScalar, LineCounter, parseDocument } from "yaml";
import { systemReason } from "../system/system-errors.ts";
import { withPlacedPaths } from "./modules.ts";
import { keyHint } from "./names-elsewhere.ts";
import { fieldOf, type Key, keyOf, spellings } from "./schema.ts";
import type { Entry, Problem } from "./sources.ts";

export interface ParsedFile {
	readonly entries: readonly Entry[];
	readonly problems: readonly Problem[];
	/** False when the file could not be understood, so that its missing keys are unknown. */
	readonly complete: boolean;
}

/** Parses a file. Throws nothing: an unreadable file and every mistake in it are in `problems`. */
export function parseFile(file: string): ParsedFile {
	let source: string;
	try {
		source = readFileSync(file, "utf8");
	} catch (error) {
		const absent = (error as NodeJS.ErrnoException).code === "ENOENT";
		const message = absent ? "there is no such file" : `it cannot be read: ${systemReason(error)}`;
		return { entries: [], problems: [{ where: `--config ${file}`, message }], complete: false };
	}
	return parseText(source, file);
}

/** Parses the text of a file called `file`; paths in it are relative to that file's folder. */
export function parseText(source: string, file: string): ParsedFile {
	const lines = new LineCounter();
	const document = parseDocument(source, { lineCounter: lines, uniqueKeys: true, prettyErrors: false });
	const problems: Problem[] = [];
	const lineAt = (offset: number | undefined) => lines.linePos(offset ?? 0).line;
	for (const error of document.errors) {
		const where = `${file}:${lineAt(error.pos[0])}`;
		if (error.code === "DUPLICATE_KEY") {
			problems.push({ where, message: `${duplicateName(source, error.pos[0])} is given a second time` });
		} else if (error.code === "MULTIPLE_DOCS") {
			problems.push({ where, message: "`---` begins a second document; a configuration is one" });
		} else {
			problems.push({ where, message: `this is not YAML: ${sentencePart(error.message)}` });
		}
	}
	const map = document.contents;
	const complete = document.errors.every((error) => error.code === "DUPLICATE_KEY");
	if (map === null) return { entries: [], problems, complete };
	if (!isMap(map)) {
		if (problems.length === 0)
			problems.push({ where: `${file}:1`, message: "the file must be a list of `key: value` lines" });
		return { entries: [], problems, complete: false };
	}
	// The parser has reported keys that are spelled twice alike.
	const reported = new Set(
		document.errors.filter(({ code }) => code === "DUPLICATE_KEY").map((error) => lineAt(error.pos[0])),
	);
	const entries: Entry[] = [];
	const seen = new Map<Key, number>();
	for (const pair of map.items) {
		const node = isScalar(pair.key) ? pair.key : null;
		const name = String(node?.value ?? "");
		const line = lineAt(node?.range?.[0]);
		const refuse = (message: string) => problems.push({ where: `${file}:${line}`, message });
		const key = keyOf(name);
		if (key === undefined) {
			refuse(`there is no key ${name}${keyHint(name, spellings)}`);
			continue;
		}
		const before = seen.get(key);
		if (before !== undefined) {
			if (!reported.has(line)) refuse(`${name} is given a second time; ${key} is on line ${before}`);
			continue;
		}
		seen.set(key, line);
		const objection = valueObjection(name, key, pair.value);
		if (objection !== null) refuse(objection);
		else entries.push({ key, value: nodeValue(key, pair.value, file), origin: { source: "file", file, line } });
	}
	return { entries, problems, complete };
}

/** Why a value's form is refused, as a sentence about the key's spelling `name`; null: it is not. */
function valueObjection(name: string, key: Key, node: unknown): string | null {
	if (isAlias(node)) {
		return `the value of ${name} starts with *, which is an alias in YAML; put a pattern in quotes, or write the value that the alias stands for`;
	}
	if (isMap(node)) return `${name} has keys below it; the file is flat, one \`key: value\` a line`;
	if (/^paths?$/.test(fieldOf(key).type.kind) && isScalar(node) && /^~(\/|$)/.test(String(node.value))) {
		return `${name} begins with ~, which only a shell replaces; write the folder's name`;
	}
	return null;
}

/** The value of a node: a path is resolved from the file's folder, and a single value of a list becomes a list. */
function nodeValue(key: Key, node: unknown, file: string): unknown {
	const value: unknown = (node as { toJSON(): unknown } | null)?.toJSON() ?? null;
	const { type } = fieldOf(key);
	const place = (path: string) => (path === "" || path.includes("://") ? path : resolve(dirname(file), path));
	if (type.kind === "path" && typeof value === "string") return place(value);
	if (type.kind === "paths") return placeBlend(value, place);
	if (type.kind === "records") return withPlacedPaths(value, place);
	return type.kind === "list" && value !== null && !Array.isArray(value) ? [value] : value;
}

/** A path, or the words of a blend, with every path resolved by `place`. */
function placeBlend(value: unknown, place: (path: string) => string): unknown {
	const isBlend = typeof value === "string" && /^\d*\.?\d+\s/.test(value);
	const words = isBlend ? value.trim().split(/\s+/) : Array.isArray(value) ? value.map(String) : null;
	if (words === null) return typeof value === "string" ? place(value) : value;
	return words.map((word) => (Number.isNaN(Number(word)) ? place(word) : word)).join(" ");
}

function duplicateName(source: string, offset: number): string {
	return /^[^\s:]+/.exec(source.slice(offset))?.[0] ?? "a key";
}

/** A library's message as the end of a sentence. */
function sentencePart(message: string): string {
	const line = message.split("\n")[0]!.replace(/[.:]+$/, "");
	return line.charAt(0).toLowerCase() + line.slice(1);
}
