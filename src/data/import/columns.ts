/** Finds the fields of a row with images and text: those that flags name, else those with common names. */
import { UserError } from "../../system/errors.ts";

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
const besides = ["system", "input", "video", "videos", "audio", "audios"];

const known = new Set<string>([
	...imageNames,
	...textNames,
	...questionNames,
	...answerNames,
	...conversationNames,
	...documentNames,
	...besides,
]);

type Fields = Readonly<Record<string, unknown>>;

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
