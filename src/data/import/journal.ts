/**
 * `import.json`, the progress of an import, from which a killed import continues. It is written at the beginning, whenever a shard
 * is full, and at the end.
 */

import { existsSync, readdirSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import { isLock, writeFileAtomically } from "../../checkpoint/index.ts";
import { UserError } from "../../system/errors.ts";
import { indexLimits, readJsonText } from "../../system/json.ts";
import { parts } from "./row.ts";

export const JOURNAL = "import.json";

const count = v.pipe(v.number(), v.safeInteger(), v.minValue(0));
const part = v.object({
	samples: count,
	next: count,
	open: v.array(v.nullable(v.object({ number: count, bytes: count, samples: count }))),
});

const schema = v.object({
	version: v.literal(1),
	/** The input and the settings of the import, as text by name; only an import with equal settings is continued. */
	settings: v.record(v.string(), v.string()),
	/** "rows": rows are being read; "missing": all rows are written, the indexes are missing; "done": the import is complete. */
	stage: v.picklist(["rows", "missing", "done"]),
	position: v.array(count),
	rows: count,
	samples: count,
	images: count,
	shards: v.object({ [parts[0]]: part, [parts[1]]: part, [parts[2]]: part }),
	/** Bytes of the list of skipped rows. */
	skippedBytes: count,
	skipped: v.array(v.object({ reason: v.string(), count, examples: v.array(v.string()) })),
});

export type Journal = v.InferOutput<typeof schema>;

/** The journal of a folder; null: the folder is empty or absent. Throws a UserError for files without a journal. */
export function readJournal(folder: string): Journal | null {
	const path = join(folder, JOURNAL);
	if (!existsSync(path)) {
		if (!existsSync(folder)) return null;
		// A lock without a journal is of an import that was killed at its beginning.
		const names = listed(folder).filter((name) => !isLock(name));
		if (names.length === 0) return null;
		throw new UserError(`--output ${folder} is not empty and holds no import: name a new folder.`);
	}
	const text = readJsonText(path, indexLimits);
	let value: unknown;
	try {
		value = JSON.parse(text);
	} catch (error) {
		throw new UserError(`${path} cannot be read: ${(error as Error).message}: remove the folder and import again.`);
	}
	const parsed = v.safeParse(schema, value);
	if (parsed.success) return parsed.output;
	const where = parsed.issues[0].path?.map(({ key }) => String(key)).join(".") ?? "its content";
	throw new UserError(`${path} is damaged at ${where}: remove the folder and import again.`);
}

function listed(folder: string): string[] {
	try {
		return readdirSync(folder);
	} catch {
		throw new UserError(`--output ${folder} is not a folder.`);
	}
}

/** Throws a UserError that names every setting in which a journal differs from `settings`. */
export function checkSettings(folder: string, journal: Journal, settings: Readonly<Record<string, string>>): void {
	const names = [...new Set([...Object.keys(journal.settings), ...Object.keys(settings)])];
	const differing = names.filter((name) => journal.settings[name] !== settings[name]);
	if (differing.length === 0) return;
	const said = differing.map((name) => `${name} was ${journal.settings[name]} and is ${settings[name]}`).join(", ");
	throw new UserError(`${folder} holds another import: ${said}; name a new folder, or remove this one.`);
}

export function writeJournal(folder: string, journal: Journal): void {
	const text = Buffer.from(`${JSON.stringify(journal, null, "\t")}\n`);
	writeFileAtomically(join(folder, JOURNAL), (file) => file.write(text));
}

// Counts skipped rows by reason, with the first examples of each.

export interface SkippedReason {
	/** The sentence without the names and numbers of a row. */
	readonly reason: string;
	readonly count: number;
	/** The sentences of the first rows. */
	readonly examples: readonly string[];
}

/** Number of examples of a reason, and of different reasons that are counted separately. */
const EXAMPLES = 3;
const MOST_REASONS = 100;
const OTHER = "other reasons";
/** A share of skipped rows is a share of at least this many rows: a few bad rows at the start of a file end no import. */
const FIRST_ROWS = 100;

/** Most skipped rows: a number, or a share of the rows that were read. */
export type SkipLimit = { readonly rows: number } | { readonly share: number };

/** Parses "500" or "10%". Throws a UserError for other texts. */
export function parseSkipLimit(text: string): SkipLimit {
	const [, digits, percent] = /^(\d{1,15}(?:\.\d{1,6})?)(%?)$/.exec(text) ?? [];
	const number = Number(digits);
	if (percent === "%" && number <= 100) return { share: number / 100 };
	if (percent === "" && Number.isInteger(number)) return { rows: number };
	throw new UserError(`--skip-limit is ${JSON.stringify(text)}; allowed are a number of rows, or a share such as 10%.`);
}

export class SkippedRows {
	readonly #reasons: Map<string, { count: number; examples: string[] }>;
	#count: number;

	constructor(before: readonly SkippedReason[] = []) {
		this.#reasons = new Map(before.map(({ reason, count, examples }) => [reason, { count, examples: [...examples] }]));
		this.#count = before.reduce((sum, { count }) => sum + count, 0);
	}

	get count(): number {
		return this.#count;
	}

	/** Reasons in descending order of frequency. */
	get reasons(): SkippedReason[] {
		return [...this.#reasons]
			.map(([reason, { count, examples }]) => ({ reason, count, examples }))
			.sort((a, b) => b.count - a.count || (a.reason < b.reason ? -1 : 1));
	}

	add(where: string, sentence: string): void {
		this.#count++;
		const own = kindOf(sentence);
		const reason = this.#reasons.has(own) || this.#reasons.size < MOST_REASONS ? own : OTHER;
		const entry = this.#reasons.get(reason) ?? { count: 0, examples: [] };
		entry.count++;
		if (entry.examples.length < EXAMPLES) entry.examples.push(`${where}: ${sentence}`);
		this.#reasons.set(reason, entry);
	}

	/** Throws a UserError if more of `rows` rows were skipped than `limit` allows. */
	check(limit: SkipLimit, rows: number, list: string): void {
		const most = "rows" in limit ? limit.rows : limit.share * Math.max(rows, FIRST_ROWS);
		if (this.#count <= most) return;
		const { reason, examples } = this.reasons[0]!;
		const hint = reason.startsWith("the image cannot be read")
			? " Image paths are relative to the folder of their file, or to --image-root."
			: "";
		throw new UserError(
			`${this.#count} of ${rows} rows were skipped, more than --skip-limit allows; most often, as in ${examples[0]}.${hint} ${list} lists them; the same command with a higher limit continues the import.`,
		);
	}
}

/** The reason of a sentence: the sentence without names and numbers. */
function kindOf(sentence: string): string {
	return sentence
		.replace(/"(?:[^"\\]|\\.)*"/g, "…")
		.replace(/(?:[a-z][a-z0-9+.-]*:\/)?\/[^\s;:,()]+/gi, "…")
		.replace(/\b\d+\b/g, "N")
		.slice(0, 200);
}

/** The reasons and examples as lines for a terminal. */
export function skippedLines(reasons: readonly SkippedReason[]): string[] {
	return reasons.flatMap(({ reason, count, examples }) => [
		`  ${count} × ${reason}`,
		...examples.map((example) => `      ${example}`),
	]);
}
