/**
 * docs/fine-tune.md: its commands run as they stand, one after another, and give the output that the page shows. Where
 * the reference Python is installed, transformers computes with the written folder too; elsewhere
 * tests/train/restart/hugging-face.test.ts holds the untrained folders to what transformers gave.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import { World } from "../../src/parallel/world.ts";
import { openRun } from "../../src/train/from-configuration.ts";
import { HuggingFaceWeights } from "../../src/train/restart/hugging-face.ts";
import { membersOf } from "../data/import/importing.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { testDevice } from "../support.ts";
import { encodedPictures, largestDifference, logitsOf } from "../train/restart/forward.ts";
import { expectedFile, resolved } from "../train/restart/vision-language.ts";
import { blocksOf, missingLines, pageCommands, type Ran, runPage } from "./page-commands.ts";

const root = join(import.meta.dir, "../..");
const page = readFileSync(join(root, "docs/fine-tune.md"), "utf8");
const folder = mkdtempSync(join(tmpdir(), "mimo-fine-tune-"));
afterAll(() => rmSync(folder, { recursive: true }));

const python = referencePython("torch", "torchvision", "transformers");

/** Without --full the trainings of the page run on half its ranks, in two thirds of the time: the samples stay the same. */
const layout = process.env.MIMO_TEST_FULL === "1" ? "" : "--encoder-dp 1 --llm-dp 1 --llm-ep 1 --num-workers 2";

let ran: readonly Ran[] = [];
/** Output of the command that begins so. */
const printed = (begin: string) => ran.find(({ command }) => command.startsWith(begin))?.printed ?? "";

beforeAll(() => {
	ran = runPage(page, folder, layout);
}, 240_000);

test("every command ends well, without a warning", () => {
	const commands = pageCommands(page);
	expect(ran.filter(({ exitCode }) => exitCode !== 0)).toEqual([]);
	expect(ran.map(({ command }) => command)).toEqual(commands);
	expect(blocksOf(page).filter(({ language }) => !["sh", "text", "python"].includes(language))).toEqual([]);
	expect(commands.length).toBeGreaterThan(12);
});

test("what the page shows of their output is what they print, but for the numbers", () => {
	const everything = ran.map(({ printed }) => printed).join("\n");
	const shown = blocksOf(page).filter(({ language }) => language === "text");
	expect(shown.flatMap((block) => missingLines(block, everything))).toEqual([]);
	expect(shown.length).toBeGreaterThan(3);
});

test("six forms of 300 pictures give the same samples", () => {
	const sets = readdirSync(join(folder, "runs/shapes")).filter((name) => name === "set" || name.startsWith("from-"));
	expect(sets).toHaveLength(6);
	const first = membersOf(join(folder, "runs/shapes/set"));
	expect(Object.keys(first)).toHaveLength(600);
	for (const set of sets) expect([set, membersOf(join(folder, "runs/shapes", set))]).toEqual([set, first]);
	for (const { command, printed } of ran.filter((one) => one.command.startsWith("mimo data import"))) {
		expect([command, printed]).toEqual([
			command,
			expect.stringContaining("300 samples with 300 images of 300 rows: train 270 in 1 shard, val 30 in 1 shard"),
		]);
	}
});

test("of held-out pictures at least nine in ten are named exactly", () => {
	const [, right, all] = /exact match +(\d+) of (\d+)/.exec(printed("mimo evaluate"))!;
	expect(Number(all)).toBe(60);
	expect(Number(right) / Number(all)).toBeGreaterThanOrEqual(0.9);
});

test("mimo generate says what is in a picture", () => {
	const questions = readFileSync(join(folder, "runs/shapes/held-out.jsonl"), "utf8");
	const first = JSON.parse(questions.split("\n")[0]!) as { readonly image: string; readonly answer: string };
	const command = ran.find((one) => one.command.startsWith("mimo generate"))!;
	expect(command.command).toContain(first.image);
	expect(command.printed.split("\n")[0]).toBe(first.answer);
});

describe.skipIf(python === null)("transformers", () => {
	const model = join(folder, "runs/shapes/model");
	const out = join(folder, "expected.safetensors");
	const expected = JSON.parse(readFileSync(expectedFile, "utf8"));

	test("says the same of the picture, by the page's own lines", async () => {
		const [block] = blocksOf(page).filter(({ language }) => language === "python");
		const said = await runPython(python!, ["-W", "ignore", "-c", block!.text], { cwd: folder });
		expect(said.split("\n")).toEqual(expect.arrayContaining(printed("mimo generate").split("\n", 1)));
	}, 120_000);

	test("gives the same features and logits with the trained folder", async () => {
		const script = join(import.meta.dir, "../reference/fine_tune.py");
		expect(await runPython(python!, [script, model, expectedFile, out])).toContain("NemotronH_Omni_Reasoning_V3 {}");
		using reference = openSafetensors(out);
		const device = await testDevice();
		const { configuration } = resolved("--load-hf", model, "--llm-offset", "0");
		const world = World.alone(device);
		const opened = await openRun(configuration, world);
		using weights = await HuggingFaceWeights.open(configuration, opened, world);
		weights.load();
		const { features, rows } = encodedPictures(device, opened, expected.grids);
		const sizes = { imageToken: 5, vocabulary: 264 };
		const differences = {
			features: largestDifference(features, reference.read("features") as Float32Array),
			text: largestDifference(
				logitsOf(device, opened, expected.text_ids, null, sizes),
				reference.read("text_logits") as Float32Array,
			),
			mixed: largestDifference(
				logitsOf(device, opened, expected.mixed_ids, rows, sizes),
				reference.read("mixed_logits") as Float32Array,
			),
		};
		rows[Symbol.dispose]();
		opened[Symbol.dispose]();
		device[Symbol.dispose]();
		console.log(`largest differences: ${JSON.stringify(differences)}`);
		// The language model's are larger where a head's time step is shorter than transformers allows (docs/fine-tune.md).
		expect(differences.features).toBeLessThan(1e-6);
		for (const value of Object.values(differences)) expect(value).toBeLessThan(5e-5);
	}, 120_000);
});
