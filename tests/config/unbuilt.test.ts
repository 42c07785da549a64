import { expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import { refuseUnbuilt } from "../../src/config/unbuilt.ts";
import { UserError } from "../../src/native/errors.ts";

const trainable = { preset: "nemotron-tiny", "data-path": "book.txt" };

test("a language model on one rank is built", () => {
	expect(() => refuseUnbuilt(configurationOf(trainable))).not.toThrow();
});

test("everything that is wanted and not built is named in one sentence", () => {
	const wanted = { ...trainable, "grad-reduce-in-bf16": true };
	expect(() => refuseUnbuilt(configurationOf(wanted))).toThrow(
		new UserError("Not built yet: reducing gradients in bf16 (grad-reduce-in-bf16)."),
	);
});
