/** Chat templates that take too much: refused by name and bound, whatever they do, and nothing else changes. */
import { describe, expect, test } from "bun:test";
import { Template } from "@huggingface/jinja";
import { Chat } from "../../../src/data/text/chat/chat.ts";
import { JinjaTemplate, linesOf } from "../../../src/data/text/chat/jinja.ts";
import { UserError } from "../../../src/system/errors.ts";

const options = { specialTokens: [], dataSpecialTokens: [], imageText: "<image>", variables: {} };
const open = (text: string) => new Chat({ file: "t.jinja", text, specialTokens: {} }, options);

/** What a template that is opened ends with. */
function refusal(text: string): string {
	try {
		open(text);
	} catch (error) {
		expect(error).toBeInstanceOf(UserError);
		return (error as Error).message;
	}
	return "none";
}

const steps = "The chat template t.jinja takes more than 5,000,000 steps, the bound of a rendering.";
const characters =
	"The chat template t.jinja reads and writes more than 134,217,728 characters, the bound of a rendering.";
const levels = "The chat template t.jinja nests more than 1,000 levels, the bound of a rendering.";
const elements = "The chat template t.jinja loops over more than 250,000 elements, the bound of a rendering.";

/** A text `ns.s` of 2^(n+1) characters. */
const long = (n: number, seed = "ab") =>
	`{% set ns = namespace(s='${seed}') %}{% for i in range(${n}) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}`;
/** A list `ns.l` of itself, which would be 2^60 elements if it were written out. */
const nested = "{% set ns = namespace(l=['a']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}";
/** Something done to a text again and again. */
const grown = (what: string) =>
	`{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ${what} %}{% endfor %}`;
const often = (what: string) => `{% for i in range(100000) %}${what}{% endfor %}`;

describe("a template is refused by its bound", () => {
	for (const [what, text, sentence] of [
		["loops in loops", often(often("")), steps],
		[
			"a macro that branches",
			"{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
			steps,
		],
		[
			"a macro that is written again and again",
			often(`{% macro f() %}${"{{ a }}".repeat(20000)}{% endmacro %}`),
			steps,
		],
		["a macro of itself", "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", levels],
		[
			"lists within lists",
			`{% set ns = namespace(l=[]) %}${often("{% set ns.l = [ns.l] %}")}{{ ns.l | tojson }}`,
			levels,
		],
		["a namespace in itself", "{% set ns = namespace() %}{% set ns.a = [ns, ns] %}{{ ns }}", levels],
		["blocks within blocks", "{% if true %}".repeat(8000) + "{% endif %}".repeat(8000), levels],
		["a long sum", `{{ ${"1+".repeat(50000)}1 }}`, levels],
		[
			"nested loops of one list",
			`{% set l = range(60000) %}${"{% for a in l %}".repeat(9)}${"{% endfor %}".repeat(9)}`,
			elements,
		],
		["a range", "{{ range(1000000000000) | length }}", characters],
		["a loop over a range", "{% for i in range(1000000000) %}x{% endfor %}", characters],
		["a text that is doubled", `${long(40)}{{ ns.s }}`, characters],
		[
			"a list that is doubled",
			"{% set ns = namespace(l=[1]) %}{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
			characters,
		],
		["a filter that replaces", grown("ns.s | replace('a', 'aa')"), characters],
		["a method that replaces", grown("ns.s.replace('a', ns.s)"), characters],
		["a method by its name", grown("ns.s['re' + 'place']('a', ns.s)"), characters],
		["a method with a list of arguments", grown("ns.s.replace(*['a', ns.s])"), characters],
		["nothing that is replaced", grown("ns.s | replace('', ns.s)"), characters],
		[
			"a filter block",
			"{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s %}{% filter replace('a', ns.s) %}{{ ns.s }}{% endfilter %}{% endset %}{% endfor %}",
			characters,
		],
		["an indentation", "{{ 'a\\nb' | indent(2000000000) }}", characters],
		["an indentation without an end", "{{ 'a\\nb' | indent(1 // 0) }}", characters],
		["an indentation of many lines", `${long(20, "\\n")}{{ ns.s | indent(1000, blank=true) }}`, characters],
		["JSON that is indented", "{{ [1, [2]] | tojson(indent=1000000000) }}", characters],
		["JSON with long separators", `${long(16)}{{ range(100000) | tojson(separators=(ns.s, ns.s)) }}`, characters],
		["JSON that escapes", `${long(25, "\\x01")}{{ ns.s | tojson }}`, characters],
		["a join", `${long(16)}{{ range(100000) | join(ns.s) }}`, characters],
		["a join of characters", `${long(16)}{{ ns.s | join(ns.s) }}`, characters],
		["a text that is split", `${long(24)}{{ ns.s.split('a') | length }}`, characters],
		["a text that is cut", `${long(24)}{{ ns.s[::2] | length }}`, characters],
		[
			"a search that almost finds",
			`${long(20)}{% set p = ns.s[:400000] ~ 'ba' %}${often("{{ p in ns.s }}")}`,
			characters,
		],
		["searches", `${long(20)}${often("{{ 'x' in ns.s }}")}`, characters],
		["comparisons", `${long(20)}{% set t = ns.s | upper | lower %}${often("{{ ns.s == t }}")}`, characters],
		["tests of a text", `${long(20)}${often("{{ ns.s is lower }}")}`, characters],
		["strips", `${long(20, "  ")}${often("{{ ns.s.strip() }}{{ ns.s | trim }}")}`, characters],
		["ends of a text", `${long(20)}${often("{{ ns.s.startswith((ns.s, ns.s)) }}")}`, characters],
		[
			"a list that is looked through",
			`{% set l = range(250000) %}${often("{{ 5.5 in l }}{{ l | unique | length }}{{ l[::-1] | length }}")}`,
			characters,
		],
		["a list in a text", `${nested}{{ ns.l ~ 'x' }}`, characters],
		["a list plus a text", `${nested}{{ ns.l + 'x' }}`, characters],
		["a list as it is", `${nested}{{ ns.l }}`, characters],
		["a list as JSON", `${nested}{{ ns.l | tojson }}`, characters],
		["a list that is joined", `${nested}{{ ns.l | join }}`, characters],
		["a list that is compared", `${nested}{{ ns.l == 'x' }}`, characters],
		["a list that is sorted", `${nested}{{ [ns.l, ns.l] | sort }}`, characters],
		[
			"a size of its own",
			"x".repeat(2 ** 18 + 1),
			"The chat template t.jinja has 262145 characters; at most 262144 are read.",
		],
		[
			"brackets within brackets",
			`{{ ${"(".repeat(100000)}1${")".repeat(100000)} }}`,
			"The chat template t.jinja, line 1 cannot be read: its parts nest too deeply.",
		],
	] as const) {
		test(what, () => expect(refusal(text)).toBe(sentence));
	}

	test("a list as the reason of a refusal, which has no text", () => {
		const chat = open(`${nested}{{ raise_exception(ns.l) if messages | length > 1 }}{{ messages[0].content }}`);
		const say = (content: string) => ({ role: "user", content: [content], fields: {} });
		expect(() => chat.render([say("a"), say("b")])).toThrow('t.jinja, line 1, refuses its turn 2 (user): "no text"');
	});
});

test("a conversation that takes too much is refused by template and bound", () => {
	const chat = open(
		"{% for m in messages %}{% for n in messages %}{% for o in messages %}{{ o.role }}{% endfor %}{% endfor %}{% endfor %}",
	);
	const turns = Array.from({ length: 300 }, () => ({ role: "user", content: ["a"], fields: {} }));
	expect(chat.render(turns.slice(0, 20))).toHaveLength(1);
	expect(() => chat.render(turns)).toThrow("t.jinja takes more than 5,000,000 steps, the bound of a rendering");
});

test("a thousand long turns are within the bounds", () => {
	const chat = open(
		"{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endfor %}",
	);
	const turns = Array.from({ length: 1000 }, (_, i) => ({
		role: i % 2 ? "tool" : "user",
		content: ["word ".repeat(1000)],
		fields: {},
	}));
	expect(chat.render(turns)).toHaveLength(1);
});

describe("the place of a mistake is found in time for the length of the template", () => {
	const many = "{{ messages[0].content }}\n".repeat(3000);
	for (const [what, text, message] of [
		["of a block", `${many}{% if %}`, "t.jinja, line 3001 cannot be read: Unexpected token: CloseStatement."],
		["of a character", `${many}{{\n ! }}`, "t.jinja, line 3002 cannot be read: Unexpected character: !."],
		["of an end", `${many}{{ 'a\n\n`, "t.jinja, line 3001 cannot be read: Unexpected end of input."],
		["of a comment's end", `${many}{# a\n\n`, "t.jinja, line 3001 cannot be read: Missing end of comment tag."],
		[
			"after many blanks",
			`${" \n".repeat(2 ** 16)}{% foo %}`,
			"t.jinja, line 65537 cannot be read: Unknown statement type: foo.",
		],
	] as const) {
		test(what, () => expect(() => new JinjaTemplate(text, "t.jinja")).toThrow(message));
	}

	test("in a rendering", () => {
		const broken = new JinjaTemplate(`${many}{{ 1 | foo }}`, "t.jinja");
		expect(() => broken.render({ messages: [{ content: "a" }] })).toThrow(
			expect.objectContaining({ message: "Unknown NumericValue filter: foo", line: 3001 }) as never,
		);
	});

	test("with quotes, comments, mappings and tags on several lines", () => {
		const text =
			"{# {{ #}\n{{ '}}{%' }}\n{% set a = {'b': {'c': \"\\\"{{\"}} %}{{\n a }}\n\n{%- generation -%}\nx\n{% endgeneration %}{{-b-}}";
		// A generation tag stands for two.
		expect(linesOf(text)).toEqual([2, 3, 3, 6, 6, 8, 8, 8]);
	});
});

test("within the bounds a template writes what it writes in the library", () => {
	const text = `
{% set ns = namespace(n=0, l=[]) %}
{% for m in messages if m.role != 'skip' %}{% if loop.index > 4 %}{% break %}{% endif %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{{ loop.index }}{{ m.role }} {{ m.content.replace('a', 'bb').replace('b', 'c', 1) }} {{ m.content | replace('l', 'L', count=1) }}
{{ m.content.split() | join('-') }} {{ m.content.split('l', 1) | tojson(indent=2) }} {{ m.content[1:3] }}{{ m.content[::-1] }}
{{ m['content'].upper() | title | lower | capitalize }} {{ m.content.startswith(('h', 'w')) | int }}{{ m.content.strip() | length }}
{% set ns.n = ns.n + loop.index0 %}{% set ns.l = ns.l + [m.content ~ ns.n] %}{{ (m.missing.more is defined) | int }}{{ m.get('role', 1) }}
{% endfor %}
{% macro show(x, y=2) %}[{{ x }}:{{ y }}{{ caller() if caller }}]{% endmacro %}{{ show(1) }}{{ show(*[1, 2]) }}{{ show(x=3, **{'y': 4}) }}
{% call show('q') %}inner{% endcall %}{% filter upper %}block {{ ns.n }}{% endfilter %}{% filter replace('o', '0') %}foo{% endfilter %}
{{ ns.l | sort(reverse=true) | join(', ') }} {{ ns.l | unique | list | length }} {{ ['b', 'a'] | sort | tojson }} {{ [1, [2, {'k': 'v"'}]] | tojson }}
{{ {'b': 1, 'a': [none, true]} | tojson(sort_keys=true, separators=(',', ':')) }} {{ {'b': 1, 'a': 2} | dictsort | tojson }} {{ ([1, 2] + [3]) | tojson }}
{{ 'a' + 'b' }} {{ ('a' ~ 1 is none) | int }} {{ ('x' in 'xyz') | int }}{{ ('q' not in ['q']) | int }}{{ ('k' in {'k': 1}) | int }}{{ 2 ** 3 % 5 }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }} {{ messages | rejectattr('role', 'equalto', 'user') | list | length }}
{{ 'a\\n\\nb' | indent(2, true) }} {{ 'a\\nb' | indent(width=3) }} {{ 'abc' | join('.') }} {{ 'k' if not ns.missing else 'z' }} {{ range(2, 10, 3) | list | tojson }}
{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{{ (loop.first and loop.last) | int }}{% else %}none{% endfor %}{{ 'ß' | upper }}{{ '1.5' | float + 1 }}`;
	const messages = ["hello world", "bye", " a l l ", "x", "y", "z"].map((content, i) => ({
		role: ["user", "tool", "assistant", "skip", "user", "user"][i]!,
		content,
	}));
	expect(new JinjaTemplate(text, "t.jinja").render({ messages })).toBe(new Template(text).render({ messages }));
});
