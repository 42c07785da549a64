import { expect, test } from "bun:test";
import { join } from "node:path";
import { configurationOf } from "../../../src/config/resolve.ts";
import type { Key } from "../../../src/config/schema.ts";
import { dataSentences, shownPath } from "../../../src/train/report/run-text.ts";

test("files below the working folder are shown from there, others as they were given", () => {
	const here = process.cwd();
	expect(shownPath(join(here, "runs/a/log.jsonl"))).toBe("runs/a/log.jsonl");
	for (const path of ["log.jsonl", "../log.jsonl", here, join(here, "../log.jsonl"), "/log.jsonl"]) {
		expect(shownPath(path)).toBe(path);
	}
});

test("the text that is trained on and what of it counts", () => {
	const golden = join(import.meta.dir, "../../golden/chat");
	const template = join(golden, "templates/vision.jinja");
	const sentences = (values: Partial<Record<Key, unknown>>, preset = "nemotron-vlm-tiny") =>
		dataSentences(configurationOf({ preset, ...values }));
	const images = "Images: resized to at least 4 patches of 8 × 8 pixels (dynamic-resolution).";
	const whole = ", and on all text without turns";
	for (const [values, text] of [
		[{}, "plain (no chat template is given), loss on all of it"],
		[
			{ "loss-roles": ["user", "assistant"] },
			`plain (no chat template is given), loss on the turns of user and assistant${whole}`,
		],
		[{ "conversation-template": "pretraining" }, "turns after their speakers' names, loss on all of it"],
		[{ "conversation-template": "chatml" }, `chatml, loss on the assistant's turns${whole}`],
		[
			{ "chat-template": template, tokenizer: golden },
			`chat template of ${shownPath(template)}, loss on the assistant's turns${whole}`,
		],
	] as const) {
		expect(sentences({ "data-path": "set.jsonl", ...values })).toEqual([`Text: ${text}.`, images]);
	}
	const alone = (path: string) => sentences({ "data-path": path }, "nemotron-tiny");
	expect(alone("book.txt")).toEqual(["Text: plain, loss on all of it."]);
	expect(alone("ids.safetensors")).toEqual(["Text: token ids as they are, loss on all of them."]);
	expect(alone("set.jsonl")).toEqual(["Text: plain (no chat template is given), loss on all of it."]);
	expect(sentences({})).toEqual([]);
});
