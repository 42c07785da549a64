/** A blend whose data sets have settings of their own: templates, prompts, pixel statistics, tiles; one is text alone. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { defaultLoadOptions } from "../../../src/data/energon/dataset.ts";
import {
	defaultLoaderConfiguration,
	type LoaderConfiguration,
} from "../../../src/data/energon/loader/configuration.ts";
import { defaultPrepareOptions, prepare } from "../../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import { byteTokenizer } from "../../../src/data/text/tokenizer.ts";
import type { ImageTextBatch } from "../../../src/data/vision-language/batch.ts";
import { taskOfDataset } from "../../../src/data/vision-language/data-settings.ts";
import type { VisionLanguageTask } from "../../../src/data/vision-language/task.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { captions, Scratch } from "../fixtures.ts";
import { LocalLoader } from "../local-loader.ts";
import { smallTask } from "./task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
let images: Images;
let blend: string;
const tiles = {
	...({ mode: "tiles", tileSize: 32, minTiles: 1, maxTiles: 4 } as const),
	...{ areaWeighted: false, thumbnail: false, tags: false },
};
const task: VisionLanguageTask = {
	...smallTask,
	endId: null,
	sizing: tiles,
	prompts: { caption: "Caption?", ocr: "", classification: "" },
};
const noStatistics = "{mimo: {image-mean: [0.0, 0.0, 0.0], image-std: [1.0, 1.0, 1.0], min-num-tiles: 4}}";

beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
	for (const name of ["one", "two"]) captions(scratch, name, [3]);
	const template = scratch.file("t.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
	const text = scratch.file("talk.jsonl", `${JSON.stringify({ messages: [{ role: "user", content: "Hi" }] })}\n`);
	prepare(text, defaultPrepareOptions);
	const settings = `{mimo: {chat-template: "${template}", caption-prompt: Tell me.}}`;
	blend = scratch.file(
		"blend.yaml",
		`__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: ./one, subflavors: ${settings}}
      - {path: ./two, subflavors: ${noStatistics}}
      - {path: ./talk.jsonl}
`,
	);
});

function samples(changed: Partial<LoaderConfiguration> = {}): ImageTextBatch[] {
	const loader = new LocalLoader(
		{
			...defaultLoaderConfiguration,
			path: blend,
			task,
			numWorkers: 0,
			batchSize: 1,
			load: { ...defaultLoadOptions, training: false, splitPart: "train" },
			...changed,
		},
		new LocalStorage(),
		images,
	);
	const batches: ImageTextBatch[] = [];
	for (let output = loader.next(); output !== null; output = loader.next()) batches.push(output.item as ImageTextBatch);
	return batches;
}

const textOf = ({ text }: ImageTextBatch) =>
	byteTokenizer.decode(text.ids.filter((id) => id !== 300)).replace(/\0+$/, "");

test("every sample has the settings of its own data set", () => {
	const batches = samples();
	const texts = batches.map(textOf);
	expect(texts.slice(0, 3).every((text) => text.startsWith("<user>\nTell me.<assistant>caption"))).toBe(true);
	expect(texts.slice(3, 6).every((text) => text.startsWith("\nCaption?\ncaption"))).toBe(true);
	expect(texts[6]).toBe("Hi");
	expect(batches.map(({ imageCount }) => imageCount)).toEqual([...batches.slice(0, 3).map(() => 1), 4, 4, 4, 0]);
	const least = (batch: ImageTextBatch) => batch.images.patches.reduce((a, b) => Math.min(a, b), 9);
	// Pixels from 0 to 1 are not normalised where mean and deviation are 0 and 1.
	for (const batch of batches.slice(3, 6)) expect(least(batch)).toBeGreaterThanOrEqual(0);
	for (const batch of batches.slice(0, 3)) expect(least(batch)).toBeLessThan(0);
});

describe("invalid settings", () => {
	for (const [what, mimo, message] of [
		[
			"a key that there is not",
			{ "caption-promt": "x" },
			"the subflavor mimo has a key caption-promt; a data set may set",
		],
		["a key of the whole run", { "seq-length": 9 }, "a data set may set conversation-template, chat-template"],
		[
			"a value of another kind",
			{ "max-num-tiles": 0 },
			"max-num-tiles of the subflavor mimo is 0; allowed is an integer",
		],
		[
			"two channels",
			{ "image-mean": [0, 0] },
			"image-mean of the subflavor mimo is [0,0]; allowed is three of: a number",
		],
		["no record", 3, "the subflavor mimo has to be a record of settings"],
		["no template", { "conversation-template": "jinja" }, "jinja of the subflavor mimo needs a chat-template"],
		["no file", { "chat-template": "/none.jinja" }, "/none.jinja: it does not exist"],
	] as const) {
		test(`${what} is refused by data set and key`, () => {
			expect(() => taskOfDataset(smallTask, { mimo }, "sets/a")).toThrow(message);
			expect(() => taskOfDataset(smallTask, { mimo }, "sets/a")).toThrow("sets/a: ");
		});
	}

	test("invalid settings are refused when the data set is opened", () => {
		const path = scratch.file(
			"wrong.yaml",
			"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {path: ./one, subflavors: {mimo: {ocr: x}}}}\n",
		);
		expect(() => samples({ path })).toThrow("the subflavor mimo has a key ocr");
	});
});
