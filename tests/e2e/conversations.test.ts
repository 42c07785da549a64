/** Conversations of several turns and images through a chat template, packed and trained on; what a person gets wrong. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { type Member, png, Scratch, tar } from "../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const golden = join(import.meta.dir, "../golden/chat");
const template = join(golden, "templates/vision.jinja");

/** A question about two pictures, an answer, a question about a third. */
function talk(i: number, role = "user"): Member[] {
	const messages = [
		{ role, content: [{ type: "image" }, { type: "text", text: `Which is ${i}?` }, { type: "image" }] },
		{ role: "assistant", content: "The first." },
		{ role: "user", content: [{ type: "text", text: "And " }, { type: "image" }, { type: "text", text: "?" }] },
		{ role: "assistant", content: "Neither<|im_end|>." },
	];
	const images = [0, 1, 2].map((n): Member => [`s${i}.img${n}.png`, png(20 + n, 16, i)]);
	return [[`s${i}.json`, JSON.stringify({ messages })], ...images];
}

beforeAll(() => {
	for (const [name, role] of [
		["talk", "user"],
		["odd", "narrator"],
	] as const) {
		const members = Array.from({ length: 12 }, (_, i) => talk(i, i === 3 ? role : "user"));
		scratch.file(`${name}/a.tar`, tar(members.flat()));
		prepare(join(scratch.path, name), { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CrudeWebdataset" });
	}
});

const common = [
	...["--preset", "nemotron-vlm-tiny", "--seq-length", "256", "--image-token-id", "12", "--vocab-size", "1024"],
	...["--tokenizer", join(golden, "tokenizer"), "--shuffle-buffer-size", "4"],
];
const train = [
	...["train", ...common, "--train-iters", "2", "--micro-batch-size", "2", "--global-batch-size", "4"],
	...[
		"--lr-warmup-iters",
		"1",
		"--log-interval",
		"1",
		"--hidden-size",
		"32",
		"--mamba-num-heads",
		"2",
		"--threads",
		"1",
	],
	...deviceFlags.split(" "),
];

test("a sample is shown as the template writes it, images in their turns, the assistant's words marked", () => {
	// As docs/conversations.md has it: the tokenizer's folder has the template.
	for (const name of ["tokenizer.json", "tokenizer_config.json"]) {
		scratch.file(`model/${name}`, readFileSync(join(golden, "tokenizer", name)));
	}
	scratch.file("model/chat_template.jinja", readFileSync(template));
	const flags = ["--data-path", "talk", "--tokenizer", "model", "--conversation-template", "jinja", "--samples", "1"];
	const { exitCode, stdout, stderr } = mimo(["data", "preview", ...common, ...flags], scratch.path);
	expect([exitCode, stderr]).toEqual([0, ""]);
	const rows = (image: number) => `<|vision_start|><image ${image}: \\d+ rows><|vision_end|>`;
	const text = `user\n  ${rows(0)}Which is \\d+\\?${rows(1)}<|im_end|>\n  <|im_start|>assistant\n  [The first.<|im_end|>]\n  <|im_start|>user\n  And ${rows(2)}\\?<|im_end|>\n  <|im_start|>assistant\n  [Neither<|im_end|>.<|im_end|>]`;
	expect(stdout).toMatch(new RegExp(text.replace(/[|[\].]/g, "\\$&")));
});

test("packs carry over what is left, and the log says how much is padding", () => {
	const flags = ["--data-path", "talk", "--chat-template", template, "--packing-buffer-size", "6"];
	const log = ["--log-json", "log.jsonl"];
	const { exitCode, stdout, stderr } = mimo([...train, ...flags, ...log], scratch.path);
	expect([exitCode, exitCode === 0 ? "" : stderr]).toEqual([0, ""]);
	expect(stdout).toMatch(/nan iterations: +0 \| padding: [0-9.]+ % \|/);
	const padding = readFileSync(join(scratch.path, "log.jsonl"), "utf8").match(/"padding":([0-9.]+)/g);
	expect(padding).toHaveLength(2);
});

test("a role that the template refuses is named with sample, turn, file and line; the run goes on without it", () => {
	const strict = scratch.file(
		"strict.jinja",
		"{% for m in messages %}\n{% if m.role == 'narrator' %}\n{{ raise_exception('Nobody narrates') }}\n{% endif %}\n{{ m.role + ': ' }}{% for p in (m.content if m.content is not string else []) %}{{ p.text if p.type == 'text' else '<|image_pad|>' }}{% endfor %}{{ m.content if m.content is string }}<|im_end|>\n{% endfor %}",
	);
	const { exitCode, stdout } = mimo([...train, "--data-path", "odd", "--chat-template", strict], scratch.path);
	expect(exitCode).toBe(0);
	expect(stdout).toContain('strict.jinja, line 3, refuses its turn 1 (narrator): "Nobody narrates"');
	expect(stdout).toContain("Sample s3 cannot be trained on");
});

for (const [what, flags, message] of [
	[
		"a template that is none",
		() => ["--chat-template", scratch.file("bad.jinja", "a\n{% fo x %}\n")],
		"bad.jinja, line 2 cannot be read: Unknown statement type: fo.",
	],
	[
		"a template without an end",
		() => [
			"--chat-template",
			scratch.file("endless.jinja", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
		],
		"endless.jinja takes more than 5,000,000 steps, the bound of a rendering.",
	],
	[
		"a folder without one",
		() => ["--conversation-template", "jinja"],
		"has no chat template: --chat-template takes a file",
	],
	[
		"another template besides",
		() => ["--chat-template", template, "--conversation-template", "chatml"],
		"allowed with chat-template is jinja",
	],
	[
		"variables that are not an object",
		() => ["--chat-template", template, "--chat-template-kwargs", "[1]"],
		"allowed is a JSON object",
	],
	[
		"a day that there is not",
		() => ["--chat-template", template, "--chat-template-date", "2026-02-30"],
		"allowed is a day, such as",
	],
	[
		"the loss of others",
		() => ["--chat-template", template, "--loss-roles", "user"],
		"allowed with conversation-template jinja is assistant",
	],
	[
		"a special token that there is not",
		() => ["--data-special-tokens", "<thnk>"],
		'"<thnk>" is not a special token of',
	],
	["more tiles at least than at most", () => ["--min-num-tiles", "20"], "allowed is at most max-num-tiles (12)"],
] as const) {
	test(`${what} is refused before anything starts`, () => {
		const { exitCode, stderr, stdout } = mimo([...train, "--data-path", "talk", ...flags()], scratch.path);
		expect(stderr).toContain(message);
		expect(exitCode).not.toBe(0);
		expect(stderr.trim().split("\n")).toHaveLength(1);
		expect(stdout).not.toContain("iteration");
	});
}
