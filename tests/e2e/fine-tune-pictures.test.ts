/**
 * docs/fine-tune-pictures.md: its commands run as they stand and give the output that the page shows. Where the reference Python is
 * installed, transformers and PEFT compute with the written folders too.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import { logitsOf } from "../reference/own-logits.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { largestDifference } from "../train/restart/forward.ts";
import { blocksOf, missingLines, pageCommands, type Ran, runPage } from "./page-commands.ts";

const page = readFileSync(join(import.meta.dir, "../../docs/fine-tune-pictures.md"), "utf8");
const folder = mkdtempSync(join(tmpdir(), "mimo-fine-tune-pictures-"));
afterAll(() => rmSync(folder, { recursive: true }));

let ran: readonly Ran[] = [];
beforeAll(() => {
	ran = runPage(page, folder);
}, 120_000);

test("every command ends well, and prints what the page shows, but for the numbers", () => {
	expect(ran.filter(({ exitCode }) => exitCode !== 0)).toEqual([]);
	expect(ran.map(({ command }) => command)).toEqual(pageCommands(page));
	const everything = ran.map(({ printed }) => printed).join("\n");
	const shown = blocksOf(page).filter(({ language }) => language === "text");
	expect(shown.flatMap((block) => missingLines(block, everything))).toEqual([]);
	expect(shown).toHaveLength(3);
});

test("of held-out pictures most are named exactly: not before, by the whole model and with the adapters", () => {
	const right = ran.flatMap(({ printed }) => {
		const [, count] = /exact match +(\d+) of 60/.exec(printed) ?? [];
		return count === undefined ? [] : [Number(count)];
	});
	expect(right).toHaveLength(3);
	expect(right[0]).toBe(0);
	for (const count of right.slice(1)) expect(count).toBeGreaterThanOrEqual(40);
});

const python = referencePython("torch", "torchvision", "transformers", "peft");
describe.skipIf(python === null)("transformers", () => {
	test("says the same of the picture, by the page's own lines", async () => {
		const [block] = blocksOf(page).filter(({ language }) => language === "python");
		const said = await runPython(python!, ["-W", "ignore", "-c", block!.text], { cwd: folder });
		const generated = ran.find(({ command }) => command.startsWith("mimo generate"))!;
		expect(said.split("\n")).toEqual(expect.arrayContaining(generated.printed.split("\n", 1)));
	}, 120_000);

	test.each([
		["the whole model", "runs/shapes/qwen", "-"],
		["adapters on the base", "examples/shapes/qwen3-vl", "runs/shapes/adapters"],
	])(
		"has the same ids, and logits to 2e-5, of %s",
		async (_, base, adapters) => {
			const [image, out] = ["runs/shapes/held-out/301.png", "logits.safetensors"].map((name) => join(folder, name));
			const script = join(import.meta.dir, "../reference/picture_logits.py");
			const question = "What is it?";
			const args = [script, base, adapters, question, out!, image!];
			expect(await runPython(python!, args, { cwd: folder })).toContain("Qwen3VLForConditionalGeneration {}");
			using reference = openSafetensors(out!);
			const peft = adapters === "-" ? [] : ["--load-peft", join(folder, adapters)];
			const { ids, logits } = await logitsOf(
				["--load-hf", join(folder, base), ...peft, "--no-bf16"],
				[image!],
				question,
			);
			expect(ids).toEqual([...(reference.read("ids.0") as Int32Array)]);
			const difference = largestDifference(logits, reference.read("logits.0") as Float32Array);
			console.log(`largest difference of logits: ${difference}`);
			expect(difference).toBeLessThan(2e-5);
		},
		120_000,
	);
});
