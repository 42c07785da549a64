/**
 * A sample as a conversation: turns of text with images at their places (docs/spec/vision.md §5.5). Crude samples give
 * theirs in `conversations` ([{from, value}]) or `messages` ([{role, content}]) of a JSON part with the image parts at its
 * `<image>` tags, as a document of OBELICS or MMC4, else in a `text` field or a text part.
 */
import { counted } from "../../system/counted.ts";
import { SampleError } from "../energon/errors.ts";
import {
	imageNamesOf,
	imagesInTars,
	interleavedRecord,
	isImageExtension,
	mediaOfCrude,
	NAMED_IMAGES,
	recordOf,
} from "../energon/format/media.ts";
import { PythonFloat, parseJsonBytes } from "../energon/format/python-text.ts";
import type { Sample } from "../energon/sample.ts";
import { type EncodedImage, isImage } from "./pixels.ts";

const imageTag = "<image>";

/** Names of speakers that stand for a role; any other name is the role itself. */
const roles: Readonly<Record<string, string>> = {
	human: "user",
	gpt: "assistant",
	model: "assistant",
	observation: "tool",
};

export function crudeConversation(sample: Sample, prompts: Prompts): Conversation {
	const refuse = (reason: string): never => {
		throw new SampleError(`Sample ${sample.key} cannot be trained on: ${reason}.`, sample.key);
	};
	const media = mediaOfCrude(sample.fields);
	if (media !== null) return refuse(media);
	const record = recordOf(sample.fields);
	const images = imagesOf(sample, record);
	const spoken = record.conversations ?? record.messages;
	if (Array.isArray(spoken)) {
		const turns = spoken.map((entry) => {
			const turn = turnOf(entry);
			return typeof turn === "string" ? refuse(turn) : turn;
		});
		const { system } = record;
		if (typeof system === "string" && system.trim() !== "" && turns[0]?.role !== "system") {
			turns.unshift({ role: "system", sender: "system", fields: {}, fragments: [system] });
		}
		return { ...placed(turns, images, refuse), ...toolsOf(record, refuse) };
	}
	const document = interleavedRecord(record);
	if (typeof document === "string") return refuse(document);
	if (document !== null) {
		const { fragments, names } = document;
		if (names.length === images.length) return { turns: [{ role: null, sender: "", fragments }], images };
		return refuse(`its document has ${counted(names.length, "image")} and it has ${images.length}`);
	}
	const text = textOf(record, sample);
	if (text === null) return refuse("it has neither a conversation nor text");
	if (images.length === 0 || text.includes(imageTag)) {
		return placed([{ role: null, sender: "", fragments: [text] }], images, refuse);
	}
	const ask: Turn = { role: "user", sender: "user", fragments: [prompts.caption] };
	return placed([ask, { role: "assistant", sender: "assistant", fragments: [text] }], images, refuse);
}

/**
 * Images that auxiliary data gave; else image parts: in the order of the record where it names every one of them, as
 * "extension" or "key.extension", else in the order of their names, numbers as numbers.
 */
function imagesOf({ key, fields }: Sample, record: Readonly<Record<string, unknown>>): readonly EncodedImage[] {
	const given = fields[NAMED_IMAGES];
	if (Array.isArray(given)) return given.filter(isImage);
	const parts = new Map(
		Object.entries(fields).filter(
			(part): part is [string, EncodedImage] => isImageExtension(part[0]) && isImage(part[1]),
		),
	);
	const named = imageNamesOf(record).map((name) => {
		if (typeof name !== "string") return undefined;
		return parts.get(name) ?? (name.startsWith(`${key}.`) ? parts.get(name.slice(key.length + 1)) : undefined);
	});
	if (named.length === parts.size && new Set(named).size === parts.size && !named.includes(undefined)) {
		return named as EncodedImage[];
	}
	return [...parts].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true })).map(([, image]) => image);
}

function textOf(record: Record<string, unknown>, sample: Sample): string | null {
	for (const value of [record.text, record.caption, sample.fields.txt, sample.fields.text]) {
		if (typeof value === "string") return value;
	}
	return null;
}

/** The turn of an entry of a conversation, or a sentence on the mistake in the entry. */
function turnOf(entry: unknown): Turn | string {
	if (typeof entry !== "object" || entry === null) return "its conversation has an entry that is not a turn";
	const { from, role, value, content, ...fields } = entry as Record<string, unknown>;
	const sender = from ?? role;
	if (typeof sender !== "string") return "its conversation has a turn of no speaker";
	const name = sender.toLowerCase();
	const turn = { role: Object.hasOwn(roles, name) ? roles[name]! : name, sender, fields };
	const said = value ?? content ?? null;
	if (name === "function_call") {
		const calls = toolCallsOf(jsonOf(said));
		if (calls === null) return "its conversation has a turn of function_call that is no JSON of a name and arguments";
		return { ...turn, role: "assistant", fields: { ...fields, tool_calls: calls }, fragments: null };
	}
	if (typeof said === "string") return { ...turn, fragments: [said] };
	if (said === null && Array.isArray(fields.tool_calls)) {
		return { ...turn, fields: content === null ? { ...fields, content } : fields, fragments: null };
	}
	if (!Array.isArray(said)) return "its conversation has a turn without text";
	let text = "";
	for (const part of said as (Record<string, unknown> | null)[]) {
		if (part?.type === "image" || part?.type === "image_url") text += imageTag;
		else if (part?.type === "text" && typeof part.text === "string") text += part.text;
		else {
			const type = JSON.stringify(String(part?.type).slice(0, 40));
			return `its conversation has content of type ${type}; it is made of text and image`;
		}
	}
	return { ...turn, fragments: [text] };
}

export function callsTools({ fragments, fields }: Turn): boolean {
	const { tool_calls: calls } = fields ?? {};
	return fragments === null || (Array.isArray(calls) && calls.length > 0);
}

/** The value of JSON text, as some data have calls and tools; null: it is not JSON. Other values are what they are. */
function jsonOf(value: unknown): unknown {
	if (typeof value !== "string") return value;
	try {
		return parseJsonBytes(Buffer.from(value));
	} catch {
		return null;
	}
}

/** The calls of a turn of ShareGPT's function_call: a call's name and arguments, or a list of them; null: it is neither. */
export function toolCallsOf(given: unknown): readonly unknown[] | null {
	const calls = [given].flat().map((call) => (call ?? {}) as { readonly name?: unknown; readonly arguments?: unknown });
	if (calls.some((call) => typeof call.name !== "string" || call.arguments === undefined)) return null;
	return calls.map((call) => ({ type: "function", function: { name: call.name, arguments: call.arguments } }));
}

/** The tools that a record says the assistant has; some write them as JSON text. */
function toolsOf(
	{ tools: given }: Readonly<Record<string, unknown>>,
	refuse: (reason: string) => never,
): Pick<Conversation, "variables"> {
	if (given === undefined || given === null || given === "") return {};
	const tools = jsonOf(given);
	return Array.isArray(tools) ? { variables: { tools } } : refuse("its tools are not a list");
}

/** Images at the tags; images without a tag go before the first turn of the user. */
function placed(
	turns: readonly Turn[],
	images: readonly EncodedImage[],
	refuse: (reason: string) => never,
): Conversation {
	const textOfTurn = ({ fragments }: Turn) => String(fragments?.[0] ?? "");
	const tags = turns.reduce((sum, turn) => sum + textOfTurn(turn).split(imageTag).length - 1, 0);
	if (tags > images.length) {
		refuse(`it has ${counted(tags, `${imageTag} tag`)} and ${counted(images.length, "image")}; ${imagesInTars}`);
	}
	if (turns.some((turn) => turn.role === "assistant" && textOfTurn(turn).includes(imageTag))) {
		refuse(`an assistant's turn has an ${imageTag} tag`);
	}
	const missing = images.length - tags;
	const first = turns.findIndex(({ role }) => role === "user");
	if (missing > 0 && first < 0) refuse("it has images but no turn of a user to put them into");
	let image = 0;
	const withImages = turns.map((turn, index): Turn => {
		if (turn.fragments === null) return turn;
		const tagged = (index === first ? `${imageTag}\n`.repeat(missing) : "") + textOfTurn(turn);
		const fragments = tagged
			.split(imageTag)
			.flatMap((text, i): Fragment[] => (i === 0 ? [text] : [{ image: image++ }, text]));
		return { ...turn, fragments: fragments.filter((fragment) => fragment !== "") };
	});
	return { turns: withImages, images };
}

/** Roles that templates of this program's own write; a Jinja template may know others, such as tool. */
export const ownRoles = ["system", "user", "assistant"] as const;
export type Role = (typeof ownRoles)[number];

export type Fragment = string | { readonly image: number };

export interface Turn {
	/** The speaker; null: text without a speaker, such as a document. */
	readonly role: string | null;
	/** Name of the speaker in the data. */
	readonly sender: string;
	/** null: a turn without content, such as one that only calls tools. */
	readonly fragments: readonly Fragment[] | null;
	/** Its other fields in the data, for Jinja templates: tool_calls, name, reasoning_content. */
	readonly fields?: Readonly<Record<string, unknown>>;
}

export interface Conversation {
	readonly turns: readonly Turn[];
	readonly images: readonly EncodedImage[];
	/** Variables of a Jinja template that belong to the sample: its tools. */
	readonly variables?: Readonly<Record<string, unknown>>;
}

/** The user's questions for data that have none, by kind of data. */
export interface Prompts {
	readonly caption: string;
	readonly ocr: string;
	readonly classification: string;
}

const user = (...fragments: Fragment[]): Turn => ({ role: "user", sender: "user", fragments });
const assistant = (text: string): Turn => ({ role: "assistant", sender: "assistant", fragments: [text] });
const document = (fragments: Fragment[]): Turn => ({ role: null, sender: "", fragments });
/** Images, then a question about them. */
const asked = (question: string, images: readonly EncodedImage[]): Turn =>
	user(...images.map((_, image) => ({ image })), ...(question === "" ? [] : [`\n${question}`]));

type Reader = (fields: Fields, prompts: Prompts) => Conversation;

/** Fields of a typed sample, with errors that name sample and field. */
class Fields {
	constructor(private readonly sample: Sample) {}

	get(name: string): unknown {
		return this.sample.fields[name] ?? null;
	}

	text(name: string): string {
		const value = this.get(name);
		if (typeof value === "string") return value;
		if (typeof value === "number" || typeof value === "bigint" || value instanceof PythonFloat) return String(value);
		return this.refuse(`the field ${name} is not text`);
	}

	/** One image, or several that a pattern of the field_map matches. */
	images(name = "image"): EncodedImage[] {
		const value = this.get(name);
		return (Array.isArray(value) ? value : [value]).map((item) => this.asImage(name, item));
	}

	asImage(name: string, value: unknown): EncodedImage {
		if (isImage(value)) return value;
		return this.refuse(`the field ${name} is not an image`);
	}

	list(name: string): readonly unknown[] {
		const value = this.get(name);
		return Array.isArray(value) ? value : this.refuse(`the field ${name} is not a list`);
	}

	/** The answer of the greatest weight, the first of several. */
	answer(): string {
		const answers = this.get("answers");
		if (typeof answers === "string") return answers;
		if (!Array.isArray(answers) || answers.length === 0) return this.refuse("it has no answers");
		const weights = this.get("answer_weights");
		const weightOf = (i: number) =>
			Array.isArray(weights) || ArrayBuffer.isView(weights) ? (weights as number[])[i]! : 0;
		const best = answers.reduce((before: number, _, i) => (weightOf(i) > weightOf(before) ? i : before), 0);
		return String(answers[best]);
	}

	refuse(reason: string): never {
		throw new SampleError(
			`Sample ${this.sample.key} (${this.sample.type}) cannot be trained on: ${reason}.`,
			this.sample.key,
		);
	}
}

/** Images, what is asked about them, what the answer is. */
function exchange(fields: Fields, question: string, answer: string): Conversation {
	const images = fields.images();
	return { turns: [asked(question, images), assistant(answer)], images };
}

const question: Reader = (fields) => exchange(fields, fields.text("context"), fields.answer());

const readers: Readonly<Record<string, Reader>> = {
	CaptioningSample: (fields, prompts) => exchange(fields, prompts.caption, fields.text("caption")),
	OCRSample: (fields, prompts) => exchange(fields, prompts.ocr, fields.text("text")),
	ImageClassificationSample: (fields, prompts) =>
		exchange(fields, prompts.classification, fields.text(fields.get("label_name") === null ? "label" : "label_name")),
	VQASample: question,
	VQAOCRSample: question,
	MultiChoiceVQASample: (fields) => {
		const choices = fields.list("choices").map((choice, i) => `${letter(i)}. ${String(choice)}`);
		const right = Number(fields.text("correct_choice_idx"));
		const answer = choices[right] ?? fields.refuse(`choice ${right} of ${choices.length} is to be the correct one`);
		return exchange(fields, [fields.text("context"), ...choices].join("\n"), answer);
	},
	TextSample: (fields) => ({ turns: [document([fields.text("text")])], images: [] }),
	InterleavedSample: (fields) => {
		const images: EncodedImage[] = [];
		const fragments = fields.list("sequence").map((item): Fragment => {
			if (typeof item === "string") return item;
			images.push(fields.asImage("sequence", item));
			return { image: images.length - 1 };
		});
		return { turns: [document(fragments)], images };
	},
	SimilarityInterleavedSample: (fields) => {
		const images = fields.list("images").map((item) => fields.asImage("images", item));
		const matched = fields.get("matched_text_indices");
		const before = images.map((_, i) => (Array.isArray(matched) ? Number(matched[i] ?? 0) : 0));
		const fragments = fields
			.list("texts")
			.flatMap((text, i): Fragment[] => [
				...before.flatMap((place, image) => (place === i ? [{ image }] : [])),
				`${i === 0 ? "" : "\n"}${String(text)}`,
			]);
		if (fragments.filter((fragment) => typeof fragment !== "string").length < images.length) {
			fields.refuse("an image belongs to a text that is not there");
		}
		return { turns: [document(fragments)], images };
	},
};

const letter = (index: number) => String.fromCharCode(65 + index);

/** The conversation of a typed or crude sample. Throws a SampleError where it has none. */
export function conversationOf(sample: Sample, prompts: Prompts): Conversation {
	if (sample.type === "CrudeSample") return crudeConversation(sample, prompts);
	const reader = readers[sample.type];
	const fields = new Fields(sample);
	return reader ? reader(fields, prompts) : fields.refuse("such samples have no text");
}

/** Why training would learn nothing, or the wrong thing, from a conversation; null: the conversation is sound. */
export function faultOf({ turns }: Conversation): string | null {
	const textOf = (fragments: readonly unknown[] | null) =>
		(fragments ?? [])
			.filter((fragment) => typeof fragment === "string")
			.join("")
			.trim();
	const answers = turns.filter(({ role }) => role === "assistant");
	const isDocument = turns.every(({ role }) => role === null);
	if (answers.length === 0 && !isDocument) return "it has no turn of an assistant, so nothing is learned from it";
	const empty = answers.findIndex((turn) => !callsTools(turn) && textOf(turn.fragments) === "");
	if (empty >= 0) return answers.length === 1 ? "its answer is empty" : `its answer ${empty + 1} is empty`;
	if (isDocument && turns.every(({ fragments }) => textOf(fragments) === "")) return "it has no text";
	return null;
}
