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
