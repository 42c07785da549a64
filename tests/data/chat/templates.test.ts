/** Chat templates against transformers' apply_chat_template: tests/golden/tools/make_chat.py made what is expected. */
import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Chat, type ChatPiece, type ChatTurn } from "../../../src/data/text/chat/chat.ts";
import { readChatTemplate } from "../../../src/data/text/chat/template-file.ts";
import { encodeCounted } from "../../../src/data/text/loss-parts.ts";
import { openTokenizer } from "../../../src/data/text/tokenizer.ts";

type Message = { role: string; content: unknown } & Record<string, unknown>;
interface Expected {
	readonly tools: unknown[];
	readonly conversations: Readonly<Record<string, Message[]>>;
	readonly cases: readonly { template: string; conversation: string; ids: number[]; mask?: string }[];
}

const folder = join(import.meta.dir, "../../golden/chat");
const expected: Expected = JSON.parse(readFileSync(join(folder, "expected.json"), "utf8"));
const tokenizer = openTokenizer(join(folder, "tokenizer"));
const imageToken = 12;

export function chatOf(template: string): Chat {
	const text = readChatTemplate(join(folder, `templates/${template}.jinja`), join(folder, "tokenizer"));
	const imageText = tokenizer.addedText(imageToken)!;
	return new Chat(text, { specialTokens: tokenizer.specialTokens, dataSpecialTokens: [], imageText, variables: {} });
}

const isSpecial = (id: number) => tokenizer.specialTokens.includes(tokenizer.addedText(id) ?? "");

/** OpenAI messages as turns, images numbered in order. */
function turnsOf(messages: readonly Message[]): ChatTurn[] {
	let image = 0;
	return messages.map(({ role, content, ...fields }) => {
		if (content === null) return { role, content, fields };
		if (typeof content === "string") return { role, content: [content], fields };
		const parts = content as { type: string; text: string }[];
		return { role, fields, content: parts.map(({ type, text }) => (type === "text" ? text : { image: image++ })) };
	});
}

/** Ids of the pieces, an image as its one token, and what counts as ones and zeros. */
function encoded(pieces: readonly ChatPiece[]): { ids: number[]; mask: string } {
	const parts = pieces.map((piece) => {
		if ("parts" in piece) return encodeCounted(tokenizer, piece.parts);
		return { ids: Int32Array.of(imageToken), loss: Uint8Array.of(0) };
	});
	return {
		ids: parts.flatMap(({ ids }) => [...ids]),
		mask: parts.flatMap(({ loss }) => [...loss]).join(""),
	};
}

describe("ids and loss spans equal those of transformers", () => {
	for (const { template, conversation, ids, mask } of expected.cases) {
		const turns = turnsOf(expected.conversations[conversation]!);
		const record = conversation === "tools" ? { tools: expected.tools } : {};
		// As published the spans are looked for; with {% generation %} blocks the template says them.
		for (const name of mask === undefined ? [template] : [template, `${template}.tagged`]) {
			test(`${name}: ${conversation}`, () => {
				const found = encoded(chatOf(name).render(turns, record));
				expect(tokenizer.decode(found.ids)).toBe(tokenizer.decode(ids));
				if (mask === undefined) {
					expect(found.ids.filter(isSpecial)).toEqual(ids.filter(isSpecial));
				} else {
					expect(found).toEqual({ ids, mask });
				}
			});
		}
	}
});

test.each([
	["{{ messages[0].content.lstrip('\\n') }}|", "\n\n  a\n", "  a\n|"],
	["{{ messages[0].content.rstrip('\\n') }}|", "\n a \n\n", "\n a |"],
	["{{ messages[0].content.strip('-*') }}|", "*-a-b-*", "a-b|"],
	["{{ messages[0].content.strip('ab') }}|", "abba", "|"],
	["{{ messages[0].content.strip() }}|", " \n a \n", "a|"],
	["{{ none | string }}{{ none | trim }}|", "a", "NoneNone|"],
])("%s is what Jinja writes", (template, content, written) => {
	const text = { file: "t.jinja", text: template, specialTokens: {} };
	const chat = new Chat(text, { specialTokens: [], dataSpecialTokens: [], imageText: "<image>", variables: {} });
	const pieces = chat.render([{ role: "user", content: [content], fields: {} }], {});
	expect(pieces.flatMap((piece) => ("parts" in piece ? piece.parts.map(({ text }) => text) : [])).join("")).toBe(
		written,
	);
});
