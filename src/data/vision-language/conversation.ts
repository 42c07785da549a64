/** A sample as a conversation: turns of text with images at their places (docs/spec/vision.md §5.5). */
import { SampleError } from "../energon/errors.ts";
import type { Sample } from "../energon/sample.ts";
import { crudeConversation } from "./crude-conversation.ts";
import { type EncodedImage, isImage } from "./encoded-image.ts";

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
		if (typeof value === "number" || typeof value === "bigint") return String(value);
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
	const empty = answers.findIndex(({ fragments }) => fragments !== null && textOf(fragments) === "");
	if (empty >= 0) return answers.length === 1 ? "its answer is empty" : `its answer ${empty + 1} is empty`;
	if (isDocument && turns.every(({ fragments }) => textOf(fragments) === "")) return "it has no text";
	return null;
}
