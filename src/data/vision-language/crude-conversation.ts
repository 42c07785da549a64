/**
 * Conversations out of crude samples: `conversations` ([{from, value}]) or `messages` ([{role, content}]) of a JSON
 * part with the image parts at its `<image>` tags, a document of OBELICS or MMC4, else a `text` field or a text part.
 */
import { counted } from "../../system/counted.ts";
import { SampleError } from "../energon/errors.ts";
import { isImageExtension } from "../energon/format/decode.ts";
import type { Sample } from "../energon/sample.ts";
import type { Conversation, Fragment, Prompts, Turn } from "./conversation.ts";
import { type EncodedImage, isImage } from "./encoded-image.ts";
import { imageNamesOf, imagesInTars, interleavedRecord, mediaOfCrude, NAMED_IMAGES, recordOf } from "./media.ts";

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
		return { ...placed(turns, images, refuse), ...toolsOf(record) };
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

/** A turn, or why an entry of a conversation is none. */
function turnOf(entry: unknown): Turn | string {
	if (typeof entry !== "object" || entry === null) return "its conversation has an entry that is not a turn";
	const { from, role, value, content, ...fields } = entry as Record<string, unknown>;
	const sender = from ?? role;
	if (typeof sender !== "string") return "its conversation has a turn of no speaker";
	const name = sender.toLowerCase();
	const turn = { role: Object.hasOwn(roles, name) ? roles[name]! : name, sender, fields };
	const said = value ?? content ?? null;
	if (typeof said === "string") return { ...turn, fragments: [said] };
	if (said === null && Array.isArray(fields.tool_calls)) return { ...turn, fragments: null };
	if (!Array.isArray(said)) return "its conversation has a turn without text";
	let text = "";
	for (const part of said as (Record<string, unknown> | null)[]) {
		if (part?.type === "image") text += imageTag;
		else if (part?.type === "text" && typeof part.text === "string") text += part.text;
		else {
			const type = JSON.stringify(String(part?.type).slice(0, 40));
			return `its conversation has content of type ${type}; it is made of text and image`;
		}
	}
	return { ...turn, fragments: [text] };
}

/** The tools that a record says the assistant has; some write them as JSON text. */
function toolsOf({ tools }: Readonly<Record<string, unknown>>): Pick<Conversation, "variables"> {
	if (typeof tools !== "string") return Array.isArray(tools) ? { variables: { tools } } : {};
	try {
		const parsed: unknown = JSON.parse(tools);
		return Array.isArray(parsed) ? { variables: { tools: parsed } } : {};
	} catch {
		return {};
	}
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
