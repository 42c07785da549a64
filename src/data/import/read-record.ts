/**
 * Converts a record of any known form into the record of a crude sample, and separates its images. Forms: `conversations` (LLaVA,
 * ShareGPT), `messages` (OpenAI, Hugging Face), pairs of `user` and `assistant` (The Cauldron), question and answer,
 * documents of OBELICS and MMC4, captions, plain text.
 */
import { counted } from "../../system/counted.ts";
import { interleavedRecord } from "../energon/format/media.ts";
import { PythonFloat, parseJsonBytes } from "../energon/format/python-text.ts";
import { reasoningNames } from "../text/chat/assistant-spans.ts";
import { toolCallsOf } from "../vision-language/conversation.ts";
import { type ImageReference, imageReferences } from "./fetch-image.ts";
import {
	answerOf,
	type Columns,
	conversationNames,
	earlierTurns,
	imageValues,
	isGiven,
	questionOf,
	SkippedRow,
	textOf,
} from "./row.ts";

const imageTag = "<image>";

interface Message {
	readonly role: string;
	/** null, absent: a turn that only calls tools. */
	readonly content?: string | null;
	/** Further fields that chat templates know. */
	readonly [field: string]: unknown;
}

/** The JSON part of a sample. */
export type SampleRecord =
	| { readonly messages: readonly Message[]; readonly tools?: readonly unknown[] }
	| { readonly caption: string }
	| { readonly text: string }
	/** A document as in OBELICS: at each position a text or the index of an image. */
	| { readonly texts: readonly (string | null)[]; readonly images: readonly (number | null)[] };

export interface Draft {
	readonly record: SampleRecord;
	/** Images, by the indices in a document, else in the order of the tags. */
	readonly images: readonly ImageReference[];
}

type Fields = Readonly<Record<string, unknown>>;

/** Roles of training by their names in data sets; other names are unchanged, and refused by the reader of conversations. */
const roles: Readonly<Record<string, string>> = {
	human: "user",
	gpt: "assistant",
	model: "assistant",
	bot: "assistant",
	chatgpt: "assistant",
	bing: "assistant",
	bard: "assistant",
};

/** Fields of a turn, besides its text, that chat templates know. */
const templateFields = ["name", "tool_calls", "tool_call_id", ...reasoningNames];

/**
 * Reads a record. `beside`: images that lie beside the record; they replace the images that the record names. Throws a SkippedRow
 * with the reason for a record that is not a sample.
 */
export function readRecord(fields: Fields, beside: readonly Uint8Array[], folder: string, columns: Columns): Draft {
	refuseOtherMedia(fields);
	const own = beside.map((bytes): ImageReference => ({ kind: "bytes", bytes }));
	const imagesOf = (values: readonly unknown[]) =>
		own.length > 0 ? own : values.flatMap((value) => imageReferences(value, folder));
	const spoken = columns.text === null && columns.answer === null ? conversationOf(fields) : null;
	if (spoken !== null) return conversation(spoken, fields, columns, imagesOf);
	const document = columns.text === null ? interleavedRecord(fields) : null;
	if (typeof document === "string") throw new SkippedRow(document);
	if (document !== null) {
		const texts = document.fragments.map((one) => (typeof one === "string" ? one : null));
		const images = document.fragments.map((one) => (typeof one === "string" ? null : one.image));
		const references = imagesOf(document.names);
		if (references.length !== document.names.length) {
			throw new SkippedRow(
				`it has ${counted(document.names.length, "place")} for images and ${counted(references.length, "image")}`,
			);
		}
		return { record: { texts, images }, images: references };
	}
	const images = imagesOf(imageValues(fields, columns));
	const answer = plainText(answerOf(fields, columns));
	const asked = plainText(questionOf(fields, columns));
	const input = plainText(fields.input);
	// torchtune's input is the question where there is no other.
	const question = asked ?? (columns.question === null ? input : null);
	if (answer !== null && question !== null) {
		// What a question is about: alpaca's input, Dolly's and SQuAD's context.
		const { context } = fields;
		const about = (asked === null ? null : input) ?? (typeof context === "string" ? plainText(context) : null);
		const system = plainText(fields.system) ?? plainText(fields.system_prompt);
		const content = about === null ? question : `${question}\n${about}`;
		const earlier = earlierTurns(fields.history).map((turn, i) => messageOf(turn, i, []));
		const messages = [
			...(system === null ? [] : [{ role: "system", content: system }]),
			...earlier,
			{ role: "user", content },
			{ role: "assistant", content: answer },
		];
		return { record: { messages }, images };
	}
	const text = plainText(textOf(fields, columns)) ?? (columns.answer === null ? null : answer);
	if (text === null) throw new SkippedRow("it has neither a conversation nor text");
	return { record: images.length === 0 || text.includes(imageTag) ? { text } : { caption: text }, images };
}

/** Text of a field: a string, a number, or the first text of a list; null: the field has no text. */
function plainText(value: unknown): string | null {
	if (typeof value === "string") return value.trim() === "" ? null : value;
	if (typeof value === "number" || typeof value === "bigint" || value instanceof PythonFloat) return String(value);
	if (Array.isArray(value)) return value.map(plainText).find((text) => text !== null) ?? null;
	return null;
}

function refuseOtherMedia(fields: Fields): void {
	for (const kind of ["video", "audio"]) {
		const name = [kind, `${kind}s`].find((one) => isGiven(fields[one]));
		if (name !== undefined) throw new SkippedRow(`its field ${name} names ${kind}, which is not built yet`);
	}
}

/** The unconverted turns of a record; null if it has no turns. */
function conversationOf(fields: Fields): readonly unknown[] | null {
	for (const name of conversationNames) {
		const value = fields[name];
		const list =
			typeof value === "string" && value.trimStart().startsWith("[") ? parsed(value, `its field ${name}`) : value;
		if (Array.isArray(list)) return list;
	}
	const { texts, prompt, completion } = fields;
	// Of a prompt and a completion in turns the completion alone counts.
	if (Array.isArray(prompt) && Array.isArray(completion)) {
		return [...prompt.map((turn) => ({ ...turn, weight: 0 })), ...completion];
	}
	const pairs = Array.isArray(texts) && texts.length > 0 && texts.every(isPair);
	return pairs
		? texts.flatMap(({ user, assistant }) => [
				{ role: "user", content: user },
				{ role: "assistant", content: assistant },
			])
		: null;
}

function isPair(value: unknown): value is { readonly user: unknown; readonly assistant: unknown } {
	return typeof value === "object" && value !== null && "user" in value && "assistant" in value;
}

function parsed(text: string, name: string): unknown {
	try {
		return parseJsonBytes(Buffer.from(text));
	} catch (error) {
		throw new SkippedRow(`${name} is not JSON (${(error as Error).message.slice(0, 100)})`);
	}
}

function conversation(
	turns: readonly unknown[],
	fields: Fields,
	columns: Columns,
	imagesOf: (values: readonly unknown[]) => readonly ImageReference[],
): Draft {
	const inTurns: unknown[] = [];
	const messages = turns.map((turn, i) => messageOf(turn, i, inTurns));
	const system = plainText(fields.system) ?? plainText(fields.system_prompt);
	if (system !== null && messages[0]?.role !== "system") messages.unshift({ role: "system", content: system });
	const beside = imageValues(fields, columns).filter(isGiven);
	if (inTurns.length > 0 && beside.length > 0) {
		throw new SkippedRow("it has images both in its turns and beside them");
	}
	return { record: { messages, ...toolsOf(fields) }, images: imagesOf(inTurns.length > 0 ? inTurns : beside) };
}

/** The tools of the record, which some data sets have as JSON text. */
function toolsOf({ tools }: Fields): { readonly tools?: readonly unknown[] } {
	if (!isGiven(tools)) return {};
	const list = typeof tools === "string" ? parsed(tools, "its field tools") : tools;
	if (!Array.isArray(list)) throw new SkippedRow("its field tools is not a list");
	return { tools: list };
}

/** Converts a turn into a message; the images of its content are added to `images`. */
function messageOf(turn: unknown, number: number, images: unknown[]): Message {
	if (typeof turn !== "object" || turn === null) throw new SkippedRow(`turn ${number + 1} is not an object`);
	const { from, role, value, content, ...rest } = turn as Fields;
	const sender = from ?? role;
	if (typeof sender !== "string" || sender === "") throw new SkippedRow(`turn ${number + 1} has no role`);
	const name = sender.toLowerCase();
	const own = Object.hasOwn(roles, name) ? roles[name]! : name;
	const said = value ?? content;
	const known = templateFields.filter((field) => isGiven(rest[field])).map((field) => [field, rest[field]]);
	// OpenAI's weight of a turn that does not count.
	const fields = Object.fromEntries(
		isGiven(rest.weight) && Number(rest.weight) === 0 ? [...known, ["weight", 0]] : known,
	);
	if (name === "function_call") return { role: "assistant", ...fields, tool_calls: callsOf(said, number) };
	if ((said ?? null) === null && Array.isArray(fields.tool_calls)) {
		return { role: own, ...(content === null && { content }), ...fields };
	}
	const text = Array.isArray(said) ? said.map((part) => partText(part, number, images)).join("") : said;
	if (typeof text !== "string") throw new SkippedRow(`turn ${number + 1} has no text`);
	return { role: own, content: text, ...fields };
}

/** The calls of a turn of ShareGPT's function_call: its text is JSON of a call's name and arguments, or of a list of them. */
function callsOf(said: unknown, number: number): readonly unknown[] {
	const given = typeof said === "string" ? parsed(said, `turn ${number + 1}, which calls tools,`) : said;
	const calls = toolCallsOf(given);
	if (calls === null) throw new SkippedRow(`turn ${number + 1} calls tools, but not by name and arguments`);
	return calls;
}

/** Text of a part of a turn's content; the tag for an image. */
function partText(part: unknown, number: number, images: unknown[]): string {
	if (typeof part === "string") return part;
	if (typeof part !== "object" || part === null) throw new SkippedRow(`turn ${number + 1} has invalid content`);
	const { type, text, image_url: url, image, ...rest } = part as Fields;
	if ((type === "text" || type === "input_text" || type === "output_text") && typeof text === "string") return text;
	if (type === "image" || type === "image_url" || type === "input_image") {
		const given = url ?? image ?? rest.url ?? rest.path ?? rest.base64 ?? rest.data ?? null;
		if (given !== null) images.push(given);
		return imageTag;
	}
	const kind = JSON.stringify(String(type).slice(0, 40));
	throw new SkippedRow(`turn ${number + 1} has content of type ${kind}; allowed are text and images`);
}
