/**
 * From folders as transformers writes them, a language model with a chat template and a tower without an image processor, to
 * saved folders that say how text and images of the training were made: read back here, and by transformers.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import { taskOf } from "../../src/data/vision-language/from-configuration.ts";
import { planImages } from "../../src/data/vision-language/image-plan.ts";
import { imagePatches } from "../../src/data/vision-language/pixels.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { Scratch } from "../data/fixtures.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { parts, resolved } from "../train/restart/vision-language.ts";

const scratch = new Scratch();
const folder = scratch.path;
afterAll(() => scratch[Symbol.dispose]());
const python = referencePython("torch", "torchvision", "transformers");
const { language } = parts;

/** Width and height; the first fill whole patches, the others are resized. */
const sizes = [
	...[
		[32, 32],
		[48, 16],
		[16, 48],
		[64, 32],
		[21, 34],
		[100, 40],
		[9, 70],
		[57, 57],
	],
] as const satisfies readonly (readonly [number, number])[];

/** A 24-bit BMP file of smooth colours, which no resampling drives out of range. */
function bmp(width: number, height: number, seed: number): Buffer {
	const stride = Math.ceil((3 * width) / 4) * 4;
	const file = Buffer.alloc(54 + stride * height);
	file.write("BM");
	file.writeUInt32LE(file.length, 2);
	file.writeUInt32LE(54, 10);
	file.writeUInt32LE(40, 14);
	file.writeInt32LE(width, 18);
	file.writeInt32LE(height, 22);
	file.writeUInt16LE(1, 26);
	file.writeUInt16LE(24, 28);
	for (let y = 0; y < height; y++) {
		for (let x = 0; x < width; x++) {
			const wave = (phase: number) => 128 + 100 * Math.sin(phase + (3 * x) / width + (2 * y) / height + seed);
			for (let c = 0; c < 3; c++) file[54 + y * stride + 3 * x + c] = wave(2 * c);
		}
	}
	return file;
}

const samples = sizes.map(([width, height], i) => ({
	image: `pictures/${i}.bmp`,
	turns: [
		{ role: "system", content: "Answer in few words." },
		{ role: "user", content: "<image>\nWhat do you see?" },
		{ role: "assistant", content: `waves ${width} wide and ${height} high` },
	],
}));

beforeAll(() => {
	for (const [i, [width, height]] of sizes.entries()) {
		scratch.file(`pictures/${i}.bmp`, bmp(width, height, i));
		scratch.file(`pictures/${i}.json`, JSON.stringify({ messages: samples[i]!.turns }));
	}
	writeFileSync(join(folder, "samples.json"), JSON.stringify(samples));
	cpSync(parts.tower, join(folder, "tower"), { recursive: true });
	rmSync(join(folder, "tower/preprocessor_config.json"));
	expect(mimo(["data", "import", "pictures", "--output", "set"], folder).exitCode).toBe(0);
});

/** A step over all samples at a learning rate of 0, and no window of the table of positions that is drawn. */
const recipe =
	`--data-path set --seq-length 256 --micro-batch-size 2 --global-batch-size 8 --train-iters 1 --lr 0 --min-lr 0 ` +
	`--moe-router-bias-update-rate 0 --no-vision-position-crop --llm-offset 0 --num-workers 1 ${deviceFlags}`;
const plain = `--load-hf ${language} --load-vision tower`;

function train(from: string, flags: string) {
	return mimo(["train", ...`${recipe} ${from} ${flags}`.split(" ").filter(Boolean)], folder);
}

/** The data's sentences of a training that saves a checkpoint and a folder, and its loss over all samples. */
function saved(name: string, from: string, flags = "") {
	const targets = `--save-hf ${name} --save ${name}-native --save-interval 1 --log-json ${name}.jsonl`;
	const { exitCode, stdout, stderr } = train(from, `${targets} ${flags}`);
	expect([exitCode, exitCode === 0 ? "" : stderr]).toEqual([0, ""]);
	const losses = readFileSync(join(folder, `${name}.jsonl`), "utf8").match(/"lm loss":([0-9.e+-]+)/);
	return { sentences: stdout.match(/^(?:Text|Images): .*$/gm) ?? [], loss: Number(losses?.[1]) };
}

interface Evaluation {
	readonly loss: number;
	readonly tokens: number;
}

const evaluations = new Map<string, Evaluation>();

/** What `mimo evaluate` gives for all samples, once for each model. */
function evaluated(...from: readonly string[]): Evaluation {
	const known = evaluations.get(from.join(" "));
	if (known !== undefined) return known;
	const flags = ["--data", "set", "--valid-data-split-part", "train", "--json", ...deviceFlags.split(" ")];
	const { exitCode, stdout, stderr } = mimo(["evaluate", ...from, ...flags], folder);
	expect([exitCode, exitCode === 0 ? "" : stderr]).toEqual([0, ""]);
	const [{ loss, tokens }] = JSON.parse(stdout).datasets;
	evaluations.set(from.join(" "), { loss, tokens });
	return { loss, tokens };
}

/** The checkpoint and the folder of a training give its own loss: equal text, equal images. */
function expectEqualLosses(name: string, loss: number): Evaluation {
	const native = evaluated("--load", `${name}-native`);
	const own = evaluated("--load-hf", name);
	expect(own).toEqual(native);
	expect(Math.abs(own.loss - loss) / loss).toBeLessThan(1e-6);
	return own;
}

function settingsOf(name: string): Record<string, unknown> {
	return JSON.parse(readFileSync(join(folder, name, "preprocessor_config.json"), "utf8"));
}

/** What transformers says with a folder alone: the same patches, tokens and loss. */
async function expectTransformers(name: string, theirs: Evaluation & { readonly grids: unknown[] }): Promise<void> {
	const own = evaluated("--load-hf", name);
	const task = taskOf(resolved("--load-hf", join(folder, name)).configuration);
	const images = new Images(await openLibrary("cpu"));
	using patches = openSafetensors(join(folder, name, "patches.safetensors"));
	for (const [i, [width, height]] of sizes.entries()) {
		const [plan] = planImages([{ width, height }], 256, task.sizing, task.tower);
		const { size } = plan!;
		expect([i, theirs.grids[i]]).toEqual([i, [size.height / 8, size.width / 8]]);
		const file = readFileSync(join(folder, samples[i]!.image));
		const picture = { file, decoding: "transformers", plan: plan!, statistics: task.statistics } as const;
		const [ours] = imagePatches(images, picture, 8);
		const read = patches.read(String(i)) as Float32Array;
		const worst = ours!.reduce((most, value, at) => Math.max(most, Math.abs(value - read[at]!)), 0);
		expect([i, worst < 1e-5]).toEqual([i, true]);
	}
	expect(theirs.tokens).toBe(own.tokens);
	expect(Math.abs(theirs.loss - own.loss) / own.loss).toBeLessThan(1e-6);
}

const text = `Text: chat template of ${language}, loss on the assistant's turns, and on all text without turns.`;

describe("plain folders", () => {
	test("train on the folder's template, and on no more patches than the tower's own", async () => {
		const { sentences, loss } = saved("plain", plain);
		expect(sentences).toEqual([text, "Images: resized to 4 to 16 patches of 8 × 8 pixels (dynamic-resolution)."]);
		expect(settingsOf("plain")).toMatchObject({ min_num_patches: 4, max_num_patches: 16, max_model_len: 256 });
		expectEqualLosses("plain", loss);
	}, 60_000);

	test("the next stage goes on with the same text and images", () => {
		const { sentences, loss } = saved("next", "--load-hf plain");
		expect(sentences).toEqual([text.replace(language, "plain"), expect.stringContaining("4 to 16 patches")]);
		expect(expectEqualLosses("next", loss)).toEqual(evaluated("--load-hf", "plain"));
	}, 60_000);

	test("other sizes and another normalisation are in the folder, and read back", async () => {
		const sizes = "--dynamic-resolution-min-patches 12 --dynamic-resolution-max-patches 40";
		const statistics = "--image-mean 0.5,0.4,0.25 --image-std 0.5,1,0.125";
		const { loss } = saved("other", plain, `${sizes} ${statistics}`);
		const expected = {
			min_num_patches: 12,
			max_num_patches: 40,
			image_mean: [0.5, 0.4, 0.25],
			image_std: [0.5, 1, 0.125],
		};
		expect(settingsOf("other")).toMatchObject(expected);
		const own = expectEqualLosses("other", loss);
		expect(own.loss).not.toBeCloseTo(evaluated("--load-hf", "plain").loss, 4);
		saved("stage", "--load-hf other");
		expect(settingsOf("stage")).toEqual(settingsOf("other"));
		expect(evaluated("--load-hf", "stage")).toEqual(own);
	}, 60_000);

	test.skipIf(python === null)(
		"are the same text and images to transformers",
		async () => {
			const script = join(import.meta.dir, "plain_folders_reference.py");
			const output = await runPython(python!, ["-W", "ignore", script, "samples.json", "plain", "other"], {
				cwd: folder,
			});
			const [first, second] = output
				.trim()
				.split("\n")
				.map((line) => JSON.parse(line));
			await expectTransformers("plain", first);
			await expectTransformers("other", second);
		},
		240_000,
	);

	test("no limit of patches but the context's, which the folder says", () => {
		const { loss, sentences } = saved("short", plain, "--dynamic-resolution-max-patches 0 --seq-length 96");
		expect(sentences[1]).toBe("Images: resized to at least 4 patches of 8 × 8 pixels (dynamic-resolution).");
		expect(settingsOf("short")).toMatchObject({ max_num_patches: 0, max_model_len: 96 });
		expectEqualLosses("short", loss);
	}, 60_000);

	test("a processor that transformers saved under another name has the settings too", () => {
		cpSync(join(folder, "other"), join(folder, "joint"), { recursive: true });
		rmSync(join(folder, "joint/preprocessor_config.json"));
		const joint = { image_processor: settingsOf("other"), processor_class: "NemotronH_Omni_Reasoning_V3Processor" };
		writeFileSync(join(folder, "joint/processor_config.json"), JSON.stringify(joint));
		expect(evaluated("--load-hf", "joint")).toEqual(evaluated("--load-hf", "other"));
		saved("joint-next", "--load-hf joint", "--dynamic-resolution-max-patches 20");
		const written = JSON.parse(readFileSync(join(folder, "joint-next/processor_config.json"), "utf8"));
		expect(written).toEqual({ ...joint, image_processor: { ...joint.image_processor, max_num_patches: 20 } });
	}, 60_000);
});

test("pictures decoded as Energon does, which a folder cannot say, are said before the first step", () => {
	const sentence = "--save-hf decoded: pictures are decoded as Energon does, and transformers decodes otherwise";
	const output = (flags: string) => {
		const { exitCode, stdout, stderr } = train(plain, flags);
		expect([exitCode, stderr]).toEqual([0, ""]);
		expect(stdout).not.toMatch(/iteration +1.*as Energon does/s);
		return stdout;
	};
	expect(output("--save-hf decoded --image-decoding energon")).toContain(sentence);
	expect(output("--image-decoding energon")).not.toContain("as Energon does");
	// An imported set says that it is decoded as transformers does; another set says nothing.
	expect(output("--save-hf imported")).not.toContain("as Energon does");
	const settings = join(folder, "set/.nv-meta/dataset.yaml");
	const imported = readFileSync(settings, "utf8");
	writeFileSync(settings, imported.replace("image-decoding: transformers", "image-decoding: energon"));
	try {
		expect(output("--save-hf decoded-by-set")).toContain(
			"--save-hf decoded-by-set: pictures are decoded as Energon does",
		);
	} finally {
		writeFileSync(settings, imported);
	}
}, 60_000);

test("images that a folder cannot say are refused before the first step, by the key", () => {
	for (const [flags, needs] of [
		["--no-dynamic-resolution", "dynamic-resolution, since images of one size (img-h, img-w) have no place in it"],
		["--img-h 48 --img-w 32", "dynamic-resolution, since images of one size (img-h, img-w) have no place in it"],
		["--use-tiling --use-tile-tags", "no use-tiling"],
		["--dynamic-resolution-min-side 24", "dynamic-resolution-min-side 0"],
	] as const) {
		const { exitCode, stdout, stderr } = train(plain, `${flags} --save-hf refused`);
		const sentence = `mimo: --save-hf refused: Hugging Face's image processor of NemotronH_Omni needs ${needs}.\n`;
		expect([flags, exitCode, stdout, stderr]).toEqual([flags, 1, "", sentence]);
	}
	const { exitCode, stdout } = train(plain, "--img-h 48 --img-w 32 --save fixed --save-interval 1");
	expect([exitCode, stdout]).toEqual([
		0,
		expect.stringContaining("Images: resized to 32 × 48 pixels, whatever their prop"),
	]);
	const converted = mimo(["convert-ckpt", "--to", "hf", "fixed", "fixed-hf"], folder);
	expect([converted.exitCode, converted.stderr]).toEqual([
		1,
		expect.stringContaining("have no place in it; --hf-reference names"),
	]);
	expect(mimo(["convert-ckpt", "--to", "hf", "--hf-reference", "plain", "fixed", "fixed-hf"], folder).exitCode).toBe(0);
	expect(settingsOf("fixed-hf")).toEqual(settingsOf("plain"));
}, 60_000);

describe("a folder of NemotronH_Nano_VL_V2", () => {
	beforeAll(() => {
		cpSync(join(folder, "plain"), join(folder, "tiled"), { recursive: true });
		const { text_config, vision_config, image_token_id, projector_hidden_size, vision_hidden_size } = JSON.parse(
			readFileSync(join(folder, "plain/config.json"), "utf8"),
		);
		const config = {
			...{
				model_type: "NemotronH_Nano_VL_V2",
				architectures: ["NemotronH_Nano_VL_V2"],
				llm_config: text_config,
				vision_config,
			},
			...{ img_context_token_id: image_token_id, projector_hidden_size, vit_hidden_size: vision_hidden_size },
			...{ downsample_ratio: 0.5, ps_version: "v2", force_image_size: 32, use_thumbnail: true },
			...{ norm_mean: [0.48145466, 0.4578275, 0.40821073], norm_std: [0.26862954, 0.26130258, 0.27577711] },
		};
		const { norm_mean, norm_std } = config;
		const processor = {
			...{
				image_processor_type: "NemotronNanoVLV2ImageProcessor",
				image_size: 32,
				max_num_tiles: 4,
				use_thumbnail: true,
			},
			...{ norm_mean, norm_std },
		};
		writeFileSync(join(folder, "tiled/config.json"), JSON.stringify(config));
		writeFileSync(join(folder, "tiled/preprocessor_config.json"), JSON.stringify(processor));
	});

	test("trains on its tiles, and a folder saved from it has those of the training", () => {
		const { sentences, loss } = saved("tiles", "--load-hf tiled");
		expect(sentences[1]).toBe("Images: cut into 1 to 4 tiles of 32 × 32 pixels and a thumbnail (use-tiling).");
		const own = expectEqualLosses("tiles", loss);
		expect(settingsOf("tiles")).toEqual(settingsOf("tiled"));
		const other = "--max-num-tiles 6 --no-use-thumbnail --img-h 16 --img-w 16 --image-mean 0.5,0.5,0.5";
		const next = saved("other-tiles", "--load-hf tiles", other);
		const values = { norm_mean: [0.5, 0.5, 0.5], use_thumbnail: false };
		expect(settingsOf("other-tiles")).toEqual({ ...settingsOf("tiled"), ...values, image_size: 16, max_num_tiles: 6 });
		const config = JSON.parse(readFileSync(join(folder, "other-tiles/config.json"), "utf8"));
		expect(config).toMatchObject({ ...values, force_image_size: 16 });
		expect(expectEqualLosses("other-tiles", next.loss).loss).not.toBeCloseTo(own.loss, 4);
	}, 60_000);

	test("is not saved with other images, by the key", () => {
		for (const [flags, needs] of [
			["--dynamic-resolution", "no dynamic-resolution, use-tiling"],
			["--use-tile-tags --min-num-tiles 2", "min-num-tiles 1, no use-tile-tags"],
		]) {
			const { exitCode, stderr } = train("--load-hf tiled", `${flags} --save-hf refused`);
			const sentence = `Hugging Face's image processor of NemotronH_Nano_VL_V2 needs ${needs}.\n`;
			expect([exitCode, stderr]).toEqual([1, `mimo: --save-hf refused: ${sentence}`]);
		}
	});
});

describe("the text of a training", () => {
	test("is plain where nothing else is there or it is asked for, and a line says so", () => {
		cpSync(language, join(folder, "silent"), { recursive: true });
		rmSync(join(folder, "silent/chat_template.jinja"));
		for (const [from, flags, sentence] of [
			["--load-hf silent --load-vision tower", "", "plain (silent has no chat template), loss on all of it"],
			[plain, "--conversation-template plain", `plain (without the chat template of ${language}), loss on all of it`],
			[plain, "--conversation-template chatml", "chatml, loss on the assistant's turns, and on all text without turns"],
			[
				plain,
				"--conversation-template plain --loss-roles assistant",
				"loss on the turns of assistant, and on all text",
			],
		]) {
			const { exitCode, stdout } = train(from!, flags!);
			expect([exitCode, stdout]).toEqual([
				0,
				expect.stringMatching(new RegExp(`^Text: .*${RegExp.escape(sentence!)}`, "m")),
			]);
		}
	}, 60_000);

	test("stays that of the checkpoint that a training goes on from", () => {
		const goOn = (flags: string) => train("--load-hf plain --load begun --save begun --save-interval 1", flags);
		expect(goOn("--conversation-template plain --no-dynamic-resolution").exitCode).toBe(0);
		const again = goOn("--train-iters 2 --override-opt-param-scheduler");
		expect([again.exitCode, again.stdout]).toEqual([
			0,
			expect.stringContaining("Text: plain (without the chat template of plain)"),
		]);
		expect(again.stdout).toContain("Images: resized to 32 × 32 pixels");
		const alone = mimo(["train", "--load", "begun", "--train-iters", "3"], folder);
		expect([alone.exitCode, alone.stdout]).toEqual([0, expect.stringContaining("Images: resized to 32 × 32 pixels")]);
		const other = goOn("--train-iters 4 --override-opt-param-scheduler --conversation-template jinja");
		const sentence = 'was saved with task.template = "plain", this run has "jinja": resume with the setting';
		expect([other.exitCode, other.stderr]).toEqual([1, expect.stringContaining(sentence)]);
	}, 60_000);

	test("of another template or tokenizer is the saved folder's", () => {
		writeFileSync(
			join(folder, "own.jinja"),
			"{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
		);
		const { loss } = saved("template", plain, "--chat-template own.jinja");
		expect(readFileSync(join(folder, "template/chat_template.jinja"), "utf8")).toBe(
			readFileSync(join(folder, "own.jinja"), "utf8"),
		);
		expectEqualLosses("template", loss);
		saved("tokenizer", plain, "--tokenizer silent");
		expect(() => readFileSync(join(folder, "tokenizer/chat_template.jinja"))).toThrow();
	}, 60_000);
});

test("the checkpoints of these trainings convert to the same folders", () => {
	for (const name of ["plain", "other", "other-tiles", "template", "tokenizer"]) {
		const { exitCode } = mimo(["convert-ckpt", "--to", "hf", `${name}-native`, `${name}-converted`], folder);
		expect([name, exitCode]).toEqual([name, 0]);
		const files = readdirSync(join(folder, name)).filter((file) => !/^(?:mimo.json|patches.safetensors)$/.test(file));
		expect(readdirSync(join(folder, `${name}-converted`)).sort()).toEqual(files.sort());
		for (const file of files) {
			const [own, other] = [name, `${name}-converted`].map((path) => readFileSync(join(folder, path, file)));
			expect([name, file, own!.equals(other!)]).toEqual([name, file, true]);
		}
	}
}, 60_000);
