/**
 * A YAML configuration file → configuration entries with line numbers. Flat: one key a line. A functional test of Megatron
 * (model_config.yaml) is one too: MODEL_ARGS holds its flags.
 */
import { readFileSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { isAlias, isMap, isScalar, LineCounter, type Pair, parseDocument } from "yaml";
import { systemReason } from "../system/system-errors.ts";
import { parseFlags } from "./flags.ts";
import { withPlacedPaths } from "./modules.ts";
import { keyHint } from "./names-elsewhere.ts";
import { fieldOf, type Key, keyOf, spellings } from "./schema.ts";
import { type Aside, describeOrigin, type Entry, type Given, type Origin, type Problem } from "./sources.ts";
import { takeUpstream } from "./upstream-flags.ts";

export interface ParsedFile extends Given {
	/** False when the file could not be understood, so that its missing keys are unknown. */
	readonly complete: boolean;
}

const nothing = { entries: [], asides: [], notes: [], problems: [] };

/** Parses a file. Throws nothing: an unreadable file and every mistake in it are in `problems`. */
export function parseFile(file: string): ParsedFile {
	let source: string;
	try {
		source = readFileSync(file, "utf8");
	} catch (error) {
		const absent = (error as NodeJS.ErrnoException).code === "ENOENT";
		const message = absent ? "there is no such file" : `it cannot be read: ${systemReason(error)}`;
		return { ...nothing, problems: [{ where: `--config ${file}`, message }], complete: false };
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
	if (map === null) return { ...nothing, problems, complete };
	if (!isMap(map)) {
		if (problems.length === 0)
			problems.push({ where: `${file}:1`, message: "the file must be a list of `key: value` lines" });
		return { ...nothing, problems, complete: false };
	}
	const flags = map.get("MODEL_ARGS");
	if (isMap(flags)) {
		const test = parseTest(flags.items, (offset) => ({ source: "file", file, line: lineAt(offset) }));
		const variables = map.get("ENV_VARS");
		return {
			...test,
			notes: [...test.notes, ...environmentNotes(variables, file)],
			problems: [...problems, ...test.problems],
			complete,
		};
	}
	// The parser has reported keys that are spelled twice alike.
	const reported = new Set(
		document.errors.filter(({ code }) => code === "DUPLICATE_KEY").map((error) => lineAt(error.pos[0])),
	);
	const entries: Entry[] = [];
	const asides: Aside[] = [];
	const notes: string[] = [];
	const seen = new Map<Key, number>();
	for (const pair of map.items) {
		const node = isScalar(pair.key) ? pair.key : null;
		const name = String(node?.value ?? "");
		const line = lineAt(node?.range?.[0]);
		const refuse = (message: string) => problems.push({ where: `${file}:${line}`, message });
		const key = keyOf(name);
		if (key === undefined) {
			const origin: Origin = { source: "file", file, line };
			const take = (flag: string, values: readonly string[]) =>
				takeUpstream(flag, values, origin, { entries, asides, notes, refuse: (_, message) => refuse(message) });
			const value: unknown = (pair.value as { toJSON(): unknown } | null)?.toJSON() ?? null;
			if (value === false ? take(`no-${name}`, []) || take(name, []) : take(name, valuesOf(value))) continue;
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
	return { entries, asides, notes, problems, complete };
}

/** A flag's values, as a command line has them. */
function valuesOf(value: unknown): string[] {
	return value === true || value === null ? [] : [value].flat().map(String);
}

/**
 * The flags of a functional test. Its runner reads a list as text in brackets, leaves out flags that are false and replaces
 * ${VARIABLES} by the environment's; one that is not set is a mistake unless a flag gives the key.
 */
function parseTest(items: readonly Pair[], originAt: (offset: number | undefined) => Origin): Given {
	const given = items.map((pair): Given => {
		const node = isScalar(pair.key) ? pair.key : null;
		const origin = originAt(node?.range?.[0]);
		const value: unknown = (pair.value as { toJSON(): unknown } | null)?.toJSON() ?? null;
		if (value === false) return nothing;
		const unset: string[] = [];
		const texts = valuesOf(value).flatMap((text) => {
			const replaced = text.replaceAll(/\$\{?(\w+)\}?/g, (whole, name: string) => {
				const found = process.env[name];
				if (found === undefined) unset.push(name);
				return found ?? whole;
			});
			return /^\[.*\]$/.test(replaced)
				? replaced
						.slice(1, -1)
						.trim()
						.split(/[\s,]+/)
				: [replaced];
		});
		const name = String(node?.value ?? "");
		const { entries, asides, notes, problems } = parseFlags([name, ...texts], {});
		const where = describeOrigin(origin);
		if (unset.length > 0 && entries.length > 0) {
			const message = `${name} is ${texts.join(" ")}, and the environment has no ${unset.join(" and no ")}; set it, or give ${name}`;
			return { ...nothing, problems: [{ where, message, unlessGiven: entries[0]!.key }] };
		}
		return {
			entries: entries.map((entry) => ({ ...entry, origin })),
			asides: asides.map((aside) => ({ ...aside, origin })),
			notes: notes.map((note) => `${where}: ${note}`),
			problems: problems.map(({ where: flag, message }) => ({ where, message: `${flag}: ${message}` })),
		};
	});
	return {
		entries: given.flatMap(({ entries }) => entries),
		asides: given.flatMap(({ asides }) => asides),
		notes: given.flatMap(({ notes }) => notes),
		problems: given.flatMap(({ problems }) => problems),
	};
}

/** Variables of a functional test, which this program cannot give itself. */
function environmentNotes(variables: unknown, file: string): string[] {
	if (!isMap(variables)) return [];
	const names = variables.items.map(({ key }) => String(isScalar(key) ? key.value : key));
	const ours = names.filter((name) => name.startsWith("NCCL_"));
	const rest = ours.length > 0 ? `; NCCL reads ${ours.join(", ")} where the shell exports it` : "";
	return [
		`${file}: ENV_VARS is not read: no operation here depends on PyTorch's or Transformer Engine's variables${rest}.`,
	];
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
