/** The five commands of the README's fine-tune, on the tiny model folders and pictures of examples/shapes and for fewer steps. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mimo } from "../commands/mimo.ts";
import { parts } from "../train/restart/vision-language.ts";

const root = join(import.meta.dir, "../..");
const folder = mkdtempSync(join(tmpdir(), "mimo-readme-"));
afterAll(() => rmSync(folder, { recursive: true }));

/** Words of the README's commands that stand for the reader's own files, and its numbers of steps. */
const own: Readonly<Record<string, string>> = {
	LM: parts.language,
	TOWER: parts.tower,
	"photo.jpg": "pictures/000.png",
	500: "10",
	2000: "10",
};

test("the README's commands lead from pictures to answers, and a run goes on from its folder", () => {
	const readme = readFileSync(join(root, "README.md"), "utf8");
	const section = readme.slice(readme.indexOf("## Fine-tune in five commands"));
	const commands = section
		.split("```")[1]!
		.split("\n")
		.filter((line) => line.startsWith("mimo "));
	expect(commands).toHaveLength(5);
	const unpack = ["tar", "-xzf", join(root, "examples/shapes/pictures.tar.gz"), "-C", folder];
	expect(Bun.spawnSync(unpack).exitCode).toBe(0);
	const outputs = [...commands, "mimo train --load run"].map((command) => {
		const words = [...command.matchAll(/"([^"]*)"|(\S+)/g)].map(([, quoted, word]) => quoted ?? own[word!] ?? word!);
		const { exitCode, stdout, stderr } = mimo(words.slice(1), folder);
		expect([command, exitCode, exitCode === 0 ? "" : stderr]).toEqual([command, 0, ""]);
		return stdout;
	});
	expect(outputs[0]).toContain("train 270 in 1 shard, val 30 in 1 shard");
	expect(outputs[1]).toContain("[a yellow cross<|im_end|>]");
	expect(outputs[2]).toContain(`Text: chat template of ${parts.language}, loss on the assistant's turns`);
	expect(outputs[3]).toContain("Files: checkpoints run, weights model.");
	expect(outputs[5]).toContain("going on after step 10.");
}, 120_000);
