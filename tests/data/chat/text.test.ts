/** Values of conversations as chat templates write them, against transformers: tests/golden/tools/make_chat_text.py made what is expected. */
import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { parseJsonBytes } from "../../../src/data/energon/format/python-text.ts";
import { Chat, type ChatPiece } from "../../../src/data/text/chat/chat.ts";
import { crudeConversation } from "../../../src/data/vision-language/conversation.ts";
import { render } from "../../../src/data/vision-language/prompt.ts";

interface Expected {
	readonly templates: Readonly<Record<string, string>>;
	/** JSON text. */
	readonly conversations: Readonly<Record<string, string>>;
	readonly cases: readonly { readonly template: string; readonly conversation: string; readonly written: string }[];
}

const expected: Expected = JSON.parse(readFileSync(join(import.meta.dir, "../../golden/chat/text.json"), "utf8"));
const ends = ["<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "<|call|>", "<|return|>"];

function piecesOf(template: string, conversation: string): ChatPiece[] {
	const chat = new Chat(
		{ file: "t.jinja", text: expected.templates[template]!, specialTokens: { bos_token: "<s>", eos_token: "</s>" } },
		{ specialTokens: ends, dataSpecialTokens: [], imageText: "<image>", variables: {} },
	);
	const fields = { json: parseJsonBytes(Buffer.from(expected.conversations[conversation]!)) };
	const sample = { key: "s", restoreKey: [], sources: [], subflavors: {}, type: "CrudeSample", fields };
	const read = crudeConversation(sample, { caption: "", ocr: "", classification: "" });
	return render("s", read, { template: "jinja", lossRoles: null, imageTags: ["", ""] }, chat);
}

/** The pieces as text; what counts between ·. */
function shown(pieces: readonly ChatPiece[], mark = "·"): string {
	const texts = pieces.flatMap((piece) => ("parts" in piece ? piece.parts : []));
	const marked = texts.map(({ text, loss }) => (loss ? mark + text + mark : text)).join("");
	return mark === "" ? marked : marked.replaceAll(mark + mark, "");
}

describe("a template writes what it writes in transformers", () => {
	for (const { template, conversation, written } of expected.cases) {
		test(`${template}: ${conversation}`, () => expect(shown(piecesOf(template, conversation), "")).toBe(written));
	}
});

describe("the parts of the assistant count", () => {
	const call = '<tool_call>\n{"name": "f", "arguments": {"x": 2.0}}\n</tool_call><|im_end|>';
	const reasoned =
		"<|start|>assistant·<|channel|>analysis<|message|>Four\nand one.<|end|><|start|>assistant<|channel|>final";
	for (const [what, template, conversation, parts] of [
		["a call of a tool that a later question follows", "qwen3", "text", [`assistant\n·\n${call}·\n`]],
		[
			"the reasoning under each of its names",
			"qwen3",
			"reasoning",
			["·<think>\nFour\nand one.\n</think>\n\nfive<|im_end|>·"],
		],
		[
			"the reasoning of a harmony template",
			"gpt-oss",
			"reasoning_content",
			[reasoned, "·<|channel|>final<|message|>four<|end|>·"],
		],
		[
			"a call of a tool, and reasoning that its template leaves out of the turn before",
			"gpt-oss",
			"absent",
			[
				'assistant· to=functions.f<|channel|>commentary json<|message|>{"x": 2.0}<|call|>·',
				"·So.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>·",
			],
		],
	] as const) {
		test(what, () => {
			const text = shown(piecesOf(template, conversation));
			for (const part of parts) expect(text).toContain(part);
		});
	}
});

test("a text and another value are not added, as in Python", () => {
	const chat = new Chat(
		{ file: "t.jinja", text: "{{ 'a' + messages[0].n }}{{ messages[0].content }}", specialTokens: {} },
		{ specialTokens: [], dataSpecialTokens: [], imageText: "<image>", variables: {} },
	);
	expect(() => chat.render([{ role: "user", content: ["x"], fields: { n: 2 } }])).toThrow(
		"str and int cannot be added",
	);
});
