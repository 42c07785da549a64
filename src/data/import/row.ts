/** Sources of rows: each row is a record of named fields, perhaps with image files beside it. */
import { UserError } from "../../system/errors.ts";

/** Parts of a data set. */
export const parts = ["train", "val", "test"] as const;
export type Part = (typeof parts)[number];

/** A position in a source, as numbers of the source's own meaning (file, byte, row, …); an empty list is the beginning. */
export type Position = readonly number[];

export interface Row {
	/** File and line, row or sample, for messages. */
	readonly where: string;
	/** Fields by name, or why the row is skipped. */
	readonly fields: Readonly<Record<string, unknown>> | SkippedRow;
	/** Image files that lie beside the record. They replace the images that the record names. Empty for most sources. */
	readonly images: readonly Uint8Array[];
	/** Folder to which image paths of the record are relative. */
	readonly folder: string;
	/** The part of the data set that the source names for the row; null: no part. */
	readonly part: Part | null;
	/** Position after this row. */
	readonly next: Position;
}

/** Why a row does not become a sample: a sentence without a full stop, which messages append to the row's position. */
export class SkippedRow extends Error {
	override readonly name = "SkippedRow";
}

export interface Source {
	/** The input for messages, such as "2 Parquet files". */
	readonly description: string;
	/** Digest of the names, sizes and times of the input's files. */
	readonly identity: string;
	/** Names of the fields of every row; null if rows have different fields. */
	readonly columns: readonly string[] | null;
	/** Rows from a position on. Throws a UserError if the rest of a file cannot be read. */
	rows(from: Position): AsyncIterable<Row> | Iterable<Row>;
}

/** A source that is read synchronously. */
export interface SyncSource extends Source {
	rows(from: Position): Iterable<Row>;
}

// Names of the classes in data sets of Hugging Face: a column of the feature ClassLabel holds their numbers.

/** Names in the order of their numbers, by column. */
export type ClassNames = ReadonlyMap<string, readonly string[]>;

type Fields = Readonly<Record<string, unknown>>;

/** The names in a data set's `features`, as dataset_info.json and the metadata of a Parquet file have them. */
export function classNamesOf(features: unknown): ClassNames {
	if (typeof features !== "object" || features === null) return new Map();
	return new Map(
		Object.entries(features).flatMap(([column, feature]) => {
			const { _type: type, names } = (feature ?? {}) as { readonly _type?: unknown; readonly names?: unknown };
			const named = type === "ClassLabel" && Array.isArray(names) && names.every((name) => typeof name === "string");
			return named ? [[column, names as string[]] as const] : [];
		}),
	);
}

/** The fields of a row with names in the place of numbers; −1 and null are no class. A number without a name skips the row. */
export function withClassNames(fields: Fields, classes: ClassNames): Fields | SkippedRow {
	const named = { ...fields };
	for (const [column, names] of classes) {
		const value = fields[column];
		if (typeof value !== "number" && typeof value !== "bigint") continue;
		const name = names[Number(value)];
		if (name === undefined && Number(value) !== -1) {
			return new SkippedRow(`its class ${value} in the column ${column} has no name: there are ${names.length}`);
		}
		named[column] = name ?? null;
	}
	return named;
}

/**
 * A row of a table with nested columns, in which every call of a tool has the arguments of all calls, null where they are another
 * call's: without them, as the call was in JSON.
 */
export function withoutOthersArguments(fields: Fields): Fields {
	const turns = conversationNames.filter((name) => Array.isArray(fields[name]));
	const own = turns.map((name) => [name, (fields[name] as unknown[]).map(withoutNullCalls)] as const);
	return { ...fields, ...Object.fromEntries(own), ...("tools" in fields && { tools: withoutNulls(fields.tools) }) };
}

function withoutNullCalls(turn: unknown): unknown {
	if (typeof turn !== "object" || turn === null || !("tool_calls" in turn)) return turn;
	return { ...turn, tool_calls: withoutNulls(turn.tool_calls) };
}

/** A value without the fields that are null, at any depth. */
function withoutNulls(value: unknown): unknown {
	if (Array.isArray(value)) return value.map(withoutNulls);
	if (value === null || typeof value !== "object" || Object.getPrototypeOf(value) !== Object.prototype) return value;
	return Object.fromEntries(
		Object.entries(value).flatMap(([name, one]) => (one === null ? [] : [[name, withoutNulls(one)]])),
	);
}

/** The end of a source's description: which of the columns that are read hold classes. */
export function describeClasses(classes: ClassNames, wanted: readonly string[]): string {
	const columns = [...classes.keys()].filter((column) => wanted.includes(column));
	return columns.length === 0 ? "" : `, with the names of the classes in ${columns.join(", ")}`;
}

// Finds the fields of a row with images and text: those that flags name, else those with common names.

/** Fields that flags name; null: found by common names. */
export interface Columns {
	readonly images: readonly string[] | null;
	readonly text: string | null;
	readonly question: string | null;
	readonly answer: string | null;
}

export const noColumns: Columns = { images: null, text: null, question: null, answer: null };

const imageNames = [
	...["image", "images", "image_path", "image_paths", "image_url", "image_urls", "image_file", "img", "img_path"],
	...["picture", "pictures", "photo", "jpg", "jpeg", "png", "webp", "file_name", "filename", "file_path", "filepath"],
	...["image_base64", "image_bytes", "url"],
];
const textNames = ["caption", "captions", "text", "txt", "description", "sentence", "alt_text", "prompt_caption"];
const questionNames = ["question", "query", "instruction", "prompt", "problem"];
const answerNames = ["answer", "answers", "multiple_choice_answer", "response", "completion", "output", "solution"];
/** Fields with conversations or documents. */
export const conversationNames = ["conversations", "conversation", "messages"] as const;
const documentNames = ["texts", "text_list", "image_info"];
/** Further fields that are read. */
const besides = [
	"system",
	"system_prompt",
	"tools",
	"input",
	"context",
	"history",
	"video",
	"videos",
	"audio",
	"audios",
];

const known = new Set<string>([
	...imageNames,
	...textNames,
	...questionNames,
	...answerNames,
	...conversationNames,
	...documentNames,
	...besides,
]);

/** Earlier questions with their answers (alpaca's `history`) as turns; an empty value has none. */
export function earlierTurns(history: unknown): readonly Fields[] {
	const pairs = isGiven(history) ? history : [];
	if (!Array.isArray(pairs) || !pairs.every((pair) => Array.isArray(pair) && pair.length === 2)) {
		throw new SkippedRow("its history does not consist of pairs of a question and an answer");
	}
	return pairs.flatMap(([user, assistant]) => [
		{ role: "user", content: user },
		{ role: "assistant", content: assistant },
	]);
}

/** Whether a value is not empty. */
export function isGiven(value: unknown): boolean {
	return value !== undefined && value !== null && value !== "" && !(Array.isArray(value) && value.length === 0);
}

function first(fields: Fields, named: string | null, names: readonly string[]): unknown {
	if (named !== null) return fields[named];
	const name = names.find((one) => Object.hasOwn(fields, one) && isGiven(fields[one]));
	return name === undefined ? undefined : fields[name];
}

/** The values of the fields that hold images, in order. */
export function imageValues(fields: Fields, { images }: Columns): unknown[] {
	if (images !== null) return images.map((name) => fields[name]);
	const value = first(fields, null, imageNames);
	return value === undefined ? [] : [value];
}

export const textOf = (fields: Fields, columns: Columns): unknown => first(fields, columns.text, textNames);
export const questionOf = (fields: Fields, columns: Columns): unknown => first(fields, columns.question, questionNames);
export const answerOf = (fields: Fields, columns: Columns): unknown => first(fields, columns.answer, answerNames);

/** The fields of `there` that are read. */
export function wantedColumns(there: readonly string[], columns: Columns): string[] {
	const named = new Set([...(columns.images ?? []), columns.text, columns.question, columns.answer]);
	return there.filter((name) => known.has(name) || named.has(name));
}

/**
 * Checks the fields of a source before its rows are read. Throws a UserError if a field that a flag names is missing, if no
 * known field holds text, or if --image-root is given and no known field holds images.
 */
export function checkColumns(
	there: readonly string[],
	columns: Columns,
	{ where, imageRoot }: { readonly where: string; readonly imageRoot: string | null },
): void {
	const has = there.length === 0 ? "none" : there.slice(0, 50).join(", ");
	const flags: readonly (readonly [flag: string, names: readonly string[]])[] = [
		["--image-column", columns.images ?? []],
		["--text-column", columns.text === null ? [] : [columns.text]],
		["--question-column", columns.question === null ? [] : [columns.question]],
		["--answer-column", columns.answer === null ? [] : [columns.answer]],
	];
	for (const [flag, names] of flags) {
		const missing = names.find((name) => !there.includes(name));
		if (missing !== undefined) throw new UserError(`${flag} ${missing}: ${where} has the columns ${has}.`);
	}
	const imagesHere = [...imageNames, ...conversationNames, ...documentNames, ...(columns.images ?? [])];
	if (imageRoot !== null && !there.some((name) => imagesHere.includes(name))) {
		throw new UserError(
			`--image-root ${imageRoot}: ${where} has the columns ${has}; none is known to hold images: name the column with --image-column.`,
		);
	}
	const readable = [columns.text, columns.answer].some((name) => name !== null);
	const texts: readonly string[] = [...textNames, ...answerNames, ...conversationNames, ...documentNames];
	if (readable || there.some((name) => texts.includes(name))) return;
	const undivided = there.length === 1 && /[;\t|]/.test(has);
	throw new UserError(
		undivided
			? `${where} has a single column ${has}: --delimiter names the character between columns.`
			: `${where} has the columns ${has}; none is known to hold text: name the column with --text-column, or --question-column and --answer-column.`,
	);
}
