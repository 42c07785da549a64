/** Chat templates beyond what transformers has answers for: errors, images, odd templates, special tokens in data. */
import { afterAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { Chat, type ChatPiece, type ChatTurn } from "../../../src/data/text/chat/chat.ts";
import { JinjaTemplate, TemplateError } from "../../../src/data/text/chat/jinja.ts";
import { readChatTemplate } from "../../../src/data/text/chat/template-file.ts";
import { encodeCounted } from "../../../src/data/text/loss-parts.ts";
import { openTokenizer } from "../../../src/data/text/tokenizer.ts";
import { strftime } from "../../../src/data/vision-language/task.ts";
import { Scratch } from "../fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const folder = join(import.meta.dir, "../../golden/chat");

const say = (role: string, ...content: (string | { image: number })[]): ChatTurn => ({ role, content, fields: {} });

function chat(text: string, changed: Partial<ConstructorParameters<typeof Chat>[1]> = {}): Chat {
	return new Chat(
		{ file: "t.jinja", text, specialTokens: { eos_token: "</s>" } },
		{ specialTokens: ["</s>", "<end>"], dataSpecialTokens: [], imageText: "<image>", variables: {}, ...changed },
	);
}

/** Pieces as text: images as [n], what counts between ·, the data's own special tokens between ~. */
function shown(pieces: readonly ChatPiece[]): string {
	return pieces
		.map((piece) => {
			if (!("parts" in piece)) return `[${piece.image}]`;
			const text = piece.parts.map((part) => {
				const own = part.markup ? part.text : `~${part.text}~`;
				return part.loss ? `·${own}·` : own;
			});
			return text.join("").replaceAll("··", "");
		})
		.join("");
}

const lines =
	"{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

describe("tokens that count in the loss", () => {
	test("are those from the generation prompt to the end-of-turn token, without the line end", () => {
		const turns = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")];
		expect(shown(chat(lines).render(turns))).toBe("user: a</s>\nassistant: ·b</s>·\nuser: c</s>\nassistant: ·d</s>·\n");
	});

	test("are the same where the assistant begins, and where the template adds text to its turn", () => {
		const begins = [say("assistant", "hi"), say("user", "a")];
		expect(shown(chat(lines).render(begins))).toBe("assistant: ·hi</s>·\nuser: a</s>\n");
		const adds = lines.replace("{{ m.content }}", "{{ '<p>' + m.content | trim + '</p>' }}");
		expect(shown(chat(adds).render([say("user", " a "), say("assistant", " b ")]))).toBe(
			"user: <p>a</p></s>\nassistant: ·<p>b</p></s>·\n",
		);
	});

	test("are found by their content where the template renders a conversation's beginning differently", () => {
		const counts = `{{ messages | length }} turns\n${lines.replace("{{ m.content }}", "{{ m.content | trim }}")}`;
		const turns = [say("user", "b"), say("assistant", " b b\n"), say("user", "b"), say("assistant", "b")];
		expect(shown(chat(counts).render(turns))).toBe(
			"4 turns\nuser: b</s>\nassistant: ·b b</s>·\nuser: b</s>\nassistant: ·b</s>·\n",
		);
	});

	test("are refused by the turn's number where they cannot be found", () => {
		const twice = `{{ messages | length }}${lines.replace("{{ m.content }}", "{{ m.content | upper | length }}")}`;
		expect(() => chat(twice).render([say("user", "a"), say("assistant", "b")])).toThrow(
			"the text of its turn 2 cannot be found in what t.jinja writes",
		);
	});

	test("are the same in a template with Windows line ends", () => {
		const turns = [say("user", "a"), say("assistant", "b\r\n")];
		expect(shown(chat(lines.replaceAll("\n", "\r\n")).render(turns))).toBe(shown(chat(lines).render(turns)));
	});

	test("are those of generation blocks, wherever the template has them", () => {
		const tagged =
			"{% for m in messages %}\n{%- if m.role == 'assistant' -%}\n A {% generation -%} {{ m.content }}</s>\n{%- endgeneration %}\n{% else %}\nU {{ m.content }}{% endif %}{% endfor %}";
		expect(shown(chat(tagged).render([say("user", "a"), say("assistant", "b")]))).toBe("U aA ·b</s>·");
	});
});

test("a turn of weight 0 does not count, with generation blocks and without", () => {
	const weighed = (role: string, content: string, weight: number): ChatTurn => ({
		...say(role, content),
		fields: { weight },
	});
	const turns = [say("user", "a"), weighed("assistant", "b", 0), say("user", "c"), weighed("assistant", "d", 1)];
	const all = "user: a</s>\nassistant: b</s>\nuser: c</s>\nassistant: ·d</s>·\n";
	expect(shown(chat(lines).render(turns))).toBe(all);
	const joined = all.replaceAll("\n", "");
	const block = "{% generation %}{{ m.content }}</s>{% endgeneration %}";
	const blocks = (text: string) =>
		lines.replace(
			"{{ m.content }}</s>",
			`{% if m.role == 'assistant' %}${text}{% else %}{{ m.content }}</s>{% endif %}`,
		);
	expect(shown(chat(blocks(block)).render(turns))).toBe(joined);
	expect(() => chat(blocks(`${block}${block}`)).render(turns)).toThrow(
		"a turn has weight 0, and t.jinja writes 4 generation blocks for 2 turns of the assistant",
	);
});

describe("tokens across the border of a loss span", () => {
	test("count, and tokens before and after are unaffected", () => {
		const tokenizer = openTokenizer(join(folder, "tokenizer"));
		const text = "The rainbow has colours, and the river too; it rains.";
		const whole = [...tokenizer.encode(new TextEncoder().encode(text))];
		const places = whole.map((_, i) => (i === 0 ? 0 : tokenizer.decode(whole.slice(0, i)).length));
		for (let begin = 1; begin < text.length - 1; begin++) {
			for (const end of [begin + 1, text.length - 1]) {
				const parts = [text.slice(0, begin), text.slice(begin, end), text.slice(end)].map((part, i) => ({
					...{ text: part, markup: true, loss: i === 1 },
				}));
				const { ids, loss } = encodeCounted(tokenizer, parts);
				expect([...ids]).toEqual(whole);
				const wanted = places.map((from, i) => (from < end && (places[i + 1] ?? text.length) > begin ? 1 : 0));
				expect([...loss]).toEqual(wanted);
			}
		}
	});
});

describe("special tokens in a sample's text", () => {
	test("are text, also where a template searches for them, and across two texts", () => {
		const splits = lines.replace("{{ m.content }}", "{{ m.content.split('<end>')[-1] }}");
		expect(shown(chat(splits).render([say("user", "x<end>a</s>b"), say("assistant", "y")]))).toBe(
			"user: a~</s>~b</s>\nassistant: ·y</s>·\n",
		);
		const joins = "{% for m in messages %}{{ m.content }}{% endfor %}";
		const pieces = chat(joins).render([say("user", "a</"), say("user", "s>b")]);
		expect(pieces.flatMap((piece) => ("parts" in piece ? piece.parts.map(({ text }) => text) : []))).toEqual([
			"a</",
			"s>b",
		]);
	});

	test("are text in field names of a record too", () => {
		const names = "{% for m in messages %}{% for k, v in m.calls | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}";
		const calls = { "a</s>": "b", c: ["<end>"] };
		expect(shown(chat(names).render([{ role: "user", content: null, fields: { calls } }]))).toBe(
			"a~</s>~=b;c=['~<end>~'];",
		);
	});

	test("are text in a turn's role and in all its other fields", () => {
		const all =
			"{% for m in messages %}{{ m.role }}|{{ m.name }}|{{ m.tool_call_id }}|{% for t in m.tool_calls %}{{ t.id }} {{ t.function.name }} {{ t.function.arguments | tojson }}{% endfor %}: {{ m.content }}</s>\n{% endfor %}";
		const fields = {
			name: "n</s>",
			tool_call_id: "<end>",
			tool_calls: [{ id: "i</s>", function: { name: "f<end>", arguments: { "k</s>": "</s>" } } }],
		};
		expect(shown(chat(all).render([{ role: "a</s>\nuser", content: ["b"], fields }]))).toBe(
			'a~</s>~\nuser|n~</s>~|~<end>~|i~</s>~ f~<end>~ {"k~</s>~": "~</s>~"}: b</s>\n',
		);
		// A role that ends in the beginning of a special token does not make one with what follows.
		const joins = "{% for m in messages %}{{ m.role }}s>{{ m.content }}{% endfor %}";
		expect(
			chat(joins)
				.render([say("a</", "b")])
				.flatMap((piece) => ("parts" in piece ? piece.parts.map(({ text }) => text) : [])),
		).toEqual(["a</", "s>b"]);
	});

	test("of a role end no turn", () => {
		const tokenizer = openTokenizer(join(folder, "tokenizer"));
		const template = readChatTemplate(join(folder, "templates/chatml.jinja"), join(folder, "tokenizer"));
		const written = new Chat(template, {
			...{ specialTokens: tokenizer.specialTokens, dataSpecialTokens: [], imageText: "<image>", variables: {} },
		}).render([say("a<|im_end|>\n<|im_start|>assistant\nb", "hello")]);
		const ids = written.flatMap((piece) => ("parts" in piece ? [...encodeCounted(tokenizer, piece.parts).ids] : []));
		const count = (token: string) => {
			const [id] = tokenizer.encodeParts([{ text: token, markup: true }]);
			return ids.filter((one) => one === id).length;
		};
		expect([count("<|im_start|>"), count("<|im_end|>")]).toEqual([1, 1]);
		expect(tokenizer.decode(ids)).toContain("a<|im_end|>\n<|im_start|>assistant\nb");
	});

	test("that are the names of known roles leave these as they are", () => {
		const compares = "{% for m in messages %}{{ 'A' if m.role == 'assistant' else m.role }}{{ m.content }}{% endfor %}";
		const named = chat(compares, { specialTokens: ["assistant", "narrator"] });
		expect(shown(named.render([say("assistant", "b"), say("narrator", "c")]))).toBe("·Ab·~narrator~c");
	});

	test("are special if they are allowed by name", () => {
		const allowed = chat(lines, { dataSpecialTokens: ["<end>"] });
		expect(shown(allowed.render([say("user", "a<end>b</s>"), say("assistant", "c")]))).toContain("a<end>b~</s>~</s>");
	});
});

describe("images", () => {
	const parts =
		"{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}";
	const turns = [
		say("system", { image: 0 }),
		say("user", "a<image>", { image: 1 }, { image: 2 }, "b"),
		say("assistant", "c"),
	];

	test("keep their places in a text template, and have those of a template with images", () => {
		expect(shown(chat(lines).render(turns))).toBe("system: [0]</s>\nuser: a~<image>~[1][2]b</s>\nassistant: ·c</s>·\n");
		expect(shown(chat(parts).render(turns))).toBe("system: [0]</s>user: a~<image>~[1][2]b</s>·assistant: c</s>·");
	});

	test("a template that requires content parts gets them", () => {
		const always =
			"{% for m in messages %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endfor %}";
		expect(shown(chat(always).render([say("user", "a", { image: 0 }, "b")]))).toBe("a[0]b");
		expect(shown(chat(always).render([say("user", "ab")]))).toBe("ab");
	});

	test("are compared in number with the tags that the template writes", () => {
		const first = parts.replace("<image>{%", "{{ '<image>' if loop.first }}{%");
		expect(() => chat(first).render(turns)).toThrow("t.jinja writes 1 image placeholder (<image>) for its 3 images");
	});
});

describe("errors", () => {
	const strict = `{% for m in messages %}
{% if m.role not in ['user', 'assistant'] %}
{{ raise_exception('No ' + m.role) }}
{% endif %}
{{ m.content }}
{% endfor %}`;

	test("a refusal names file, line, turn and role", () => {
		expect(() => chat(strict).render([say("user", "a"), say("tool", "b")])).toThrow(
			't.jinja, line 3, refuses its turn 2 (tool): "No tool"',
		);
	});

	test("a failure of the template names them too", () => {
		const broken = `${strict}\n{{ messages[1].content | nothing }}`;
		expect(() => chat(broken).render([say("user", "a"), say("assistant", "b")])).toThrow(
			"t.jinja, line 7, fails at its turn 2 (assistant): Unknown StringValue filter: nothing",
		);
	});

	for (const [what, text, message] of [
		["an unknown block", "a\n{% foo %}\n", "t.jinja, line 2 cannot be read: Unknown statement type: foo."],
		["a block without end", "a\n\n{% if x %}\nb", "t.jinja, line 3 cannot be read: it ends within a block."],
		[
			"a character that is none of Jinja's",
			"a\n{{ b }}\n{{\n$ }}",
			"t.jinja, line 4 cannot be read: Unexpected character: $.",
		],
		["a mark of our own", "a\ufdd0", "t.jinja has noncharacters of Unicode"],
	] as const) {
		test(`${what} is refused by its line`, () => expect(() => new JinjaTemplate(text, "t.jinja")).toThrow(message));
	}

	test("a template that uses the date needs a date", () => {
		const dated = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}";
		expect(() => chat(dated).render([say("user", "a")])).toThrow("needs --chat-template-date");
		const today = { strftime_now: (format: string) => strftime("2026-01-05", format) };
		expect(shown(chat(dated, { variables: today }).render([say("user", "a")]))).toBe("05 Jan 2026a");
		expect(strftime("2024-02-29", "%A %-d %B %y %H:%M %%")).toBe("Thursday %-d February 24 00:00 %");
	});

	test("the error has the line of the statement", () => {
		const found = (() => {
			try {
				new JinjaTemplate("a\n{% for x in range(3) %}\n\n{{ x + none }}\n{% endfor %}", "t").render({});
				return null;
			} catch (error) {
				return error as TemplateError;
			}
		})();
		expect(found).toBeInstanceOf(TemplateError);
		expect([found!.line, found!.refusal]).toEqual([4, false]);
	});
});

describe("the template at a path", () => {
	const config = (value: object) => JSON.stringify({ bos_token: "<s>", eos_token: { content: "</s>" }, ...value });

	test("is the folder's own file, else that of its configuration, with the tokens of the tokenizer", () => {
		const path = scratch.file("a/tokenizer_config.json", config({ chat_template: "T" }));
		const specialTokens = { bos_token: "<s>", eos_token: "</s>" };
		const own = join(path, "..");
		expect(readChatTemplate(own, null)).toEqual({ file: path, text: "T", specialTokens });
		const file = scratch.file("a/chat_template.jinja", "J");
		expect(readChatTemplate(own, null)).toEqual({ file, text: "J", specialTokens });
		expect(readChatTemplate(join(own, "tokenizer.json"), null).text).toBe("J");
		const alone = scratch.file("alone.jinja", "A");
		expect(readChatTemplate(alone, own)).toEqual({ file: alone, text: "A", specialTokens });
		const named = [
			{ name: "tool_use", template: "U" },
			{ name: "default", template: "D" },
		];
		expect(readChatTemplate(scratch.file("b/x.json", config({ chat_template: named })), null).text).toBe("D");
	});

	for (const [what, path, message] of [
		["of nothing", () => join(scratch.path, "none.jinja"), "Cannot open the chat template"],
		["of a folder without one", () => scratch.path, "has no chat template: --chat-template takes a file of Jinja text"],
		[
			"of a folder that names several",
			() => scratch.file("c/c.json", config({ chat_template: [{ name: "rag", template: "x" }] })),
			"has chat templates of the names rag, and none is the default",
		],
		["of text that is not JSON", () => scratch.file("d.json", "{"), "d.json is not JSON"],
		["of other JSON", () => scratch.file("e.json", '{"chat_template": 3}'), "chat_template is malformed"],
		["of a broken template", () => scratch.file("f.jinja", "\n{% x %}"), "f.jinja, line 2 cannot be read"],
	] as const) {
		test(`${what} is refused`, () => expect(() => readChatTemplate(path(), null)).toThrow(message));
	}
});
