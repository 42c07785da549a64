/** Files beside a model's weights: what is passed on with the model, and that links do not bring other files into it. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { companionsOf, preprocessorOf, tokenizerOf } from "../../../src/checkpoint/hf/companions.ts";
import { folderTexts } from "../../../src/checkpoint/hf/image-processor.ts";
import { readAdapterSettings } from "../../../src/checkpoint/lora/peft-folder.ts";
import { readChatTemplate } from "../../../src/data/text/chat/template-file.ts";

let scratch: string;
beforeAll(() => {
	scratch = mkdtempSync(join(tmpdir(), "mimo-companions-"));
	writeFileSync(join(scratch, "secret"), "secret");
});
afterAll(() => rmSync(scratch, { recursive: true }));

function folder(name: string, files: Readonly<Record<string, string>>): string {
	const path = join(scratch, name);
	mkdirSync(path, { recursive: true });
	for (const [file, content] of Object.entries(files)) writeFileSync(join(path, file), content);
	return path;
}
const names = (files: ReadonlyMap<string, Uint8Array>) => [...files.keys()];

test("tokenizer, templates, code and licence are taken, weights and folders are not", () => {
	const files = ["LICENSE", "chat_template.jinja", "modeling_x.py", "preprocessor_config.json", "tokenizer.json"];
	const path = folder("plain", Object.fromEntries([...files, "config.json", "notes.md"].map((name) => [name, name])));
	mkdirSync(join(path, "code.py"));
	symlinkSync("code.py", join(path, "linked.py"));
	expect(names(companionsOf(path))).toEqual(files);
	expect(names(preprocessorOf(path))).toEqual(["preprocessor_config.json"]);
	expect(names(tokenizerOf(path))).toEqual(["chat_template.jinja", "tokenizer.json"]);
});

test("a link out of the folder is refused, whatever the file", () => {
	for (const name of ["LICENSE", "special_tokens_map.json", "modeling_x.py", "chat_template.jinja", "tokenizer.json"]) {
		const path = folder(`links-${name}`, { "tokenizer_config.json": "{}" });
		symlinkSync("../secret", join(path, name));
		const refusal = `Cannot open ${join(path, name)}: it is a link that leads out of its folder`;
		expect(() => companionsOf(path)).toThrow(refusal);
		if (!/LICENSE|py$/.test(name)) expect(() => tokenizerOf(path)).toThrow(refusal);
	}
	const path = folder("gone", {});
	symlinkSync("absent", join(path, "LICENSE"));
	expect(() => companionsOf(path)).toThrow(`Cannot open ${join(path, "LICENSE")}: it does not exist.`);
});

test("settings of images, adapters and templates that are links out of the folder are not read", () => {
	const path = folder("settings", {});
	for (const name of ["preprocessor_config.json", "adapter_config.json", "tokenizer_config.json"])
		symlinkSync("../secret", join(path, name));
	const refusal = (name: string) => `Cannot open ${join(path, name)}: it is a link that leads out of its folder`;
	const { textOf } = folderTexts({ path, configText: "{}" });
	expect(() => textOf("preprocessor_config.json")).toThrow(refusal("preprocessor_config.json"));
	expect(() => readAdapterSettings(path)).toThrow(refusal("adapter_config.json"));
	writeFileSync(join(scratch, "secret"), "{}");
	expect(() => readChatTemplate(path, null)).toThrow(
		refusal("tokenizer_config.json").replace("open", "open the chat template"),
	);
});

test("the download cache is links to its blobs, and a tokenizer.json may be given through a link", () => {
	const blobs = folder("models--a--b/blobs", { aa: "{}", bb: "licence" });
	const snapshot = folder("models--a--b/snapshots/1", {});
	symlinkSync("../../blobs/aa", join(snapshot, "tokenizer.json"));
	symlinkSync("../../blobs/bb", join(snapshot, "LICENSE"));
	expect(names(companionsOf(snapshot))).toEqual(["LICENSE", "tokenizer.json"]);
	const given = folder("given", {});
	symlinkSync(join(blobs, "aa"), join(given, "own.json"));
	expect(names(tokenizerOf(join(given, "own.json")))).toEqual(["tokenizer.json"]);
});

test("a pipe is refused at once, and so is more than memory has room for", () => {
	const path = folder("pipe", {});
	Bun.spawnSync(["mkfifo", join(path, "a.py")]);
	expect(() => companionsOf(path)).toThrow(`Cannot open ${join(path, "a.py")}: it is not a regular file.`);
	const large = folder("large", { "a.py": "", "b.py": "" });
	truncateSync(join(large, "a.py"), 2 ** 28 - 10);
	truncateSync(join(large, "b.py"), 11);
	expect(() => companionsOf(large)).toThrow(`${join(large, "b.py")} has 11 bytes, more than the 10 that are read`);
});
