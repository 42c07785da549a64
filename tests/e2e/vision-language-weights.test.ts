/** A vision-language model from the folders of its parts, trained in stages on several layouts, back into one folder. */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { bytesOf } from "../../src/checkpoint/dtype.ts";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { expectedFile, fromParts, parts, still } from "../train/restart/vision-language.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-vision-language-weights-"));
afterAll(() => rmSync(folder, { recursive: true }));

/** Shape and SHA-256 of every tensor: of a folder, and as transformers' own class wrote the whole model. */
type Tensors = Readonly<Record<string, readonly [shape: readonly number[], sha256: string]>>;
const expected = JSON.parse(readFileSync(expectedFile, "utf8"));
const theirs: Tensors = Object.fromEntries(
	Object.entries(expected.whole_tensors as Record<string, [number[], string, string]>).map(
		([name, [shape, , sha256]]) => [name, [shape, sha256]],
	),
);

function tensorsOf(name: string, path = "model.safetensors"): Tensors {
	using file = openSafetensors(join(folder, name, path));
	return Object.fromEntries(
		[...file.tensors].map(([tensor, { shape }]) => [
			tensor,
			[shape, new Bun.CryptoHasher("sha256").update(bytesOf(file.read(tensor))).digest("hex")],
		]),
	);
}

function train(...flags: readonly string[]) {
	const outcome = mimo(["train", ...still, ...flags], folder);
	expect([outcome.exitCode, outcome.stderr]).toEqual([0, ""]);
	return outcome;
}

/** First parts of the names of tensors that differ: the modules that were trained. */
function changed(before: Tensors, after: Tensors): string[] {
	const names = Object.keys(after).filter((name) => before[name]?.[1] !== after[name]![1]);
	return [...new Set(names.map((name) => name.split(".")[0]!))].sort();
}

describe("a model of three parts", () => {
	test("on two and two ranks it is transformers' own folder", () => {
		const layout = "--encoder-tp 2 --llm-tp 2 --llm-ep 2 --save checkpoint --save-interval 1".split(" ");
		const { stdout } = train(...fromParts, ...layout, "--save-hf", "whole");
		expect(stdout).toContain(`vision tower of ${parts.tower}, projector of ${parts.projector}.`);
		expect(tensorsOf("whole")).toEqual(theirs);
		expect(readdirSync(join(folder, "whole")).sort()).toEqual([
			...["chat_template.jinja", "config.json", "generation_config.json", "mimo.json", "model.safetensors"],
			...["preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"],
		]);
		const config = JSON.parse(readFileSync(join(folder, "whole/config.json"), "utf8"));
		const { video_patch_dim: _, ...vision } = expected.whole_config.vision_config;
		expect(config.vision_config).toMatchObject({ ...vision, video_temporal_patch_size: 2 });
		expect(config.text_config).toMatchObject(expected.whole_config.text_config);
		for (const key of ["model_type", "architectures", "image_token_id", "projector_hidden_size", "downsample_ratio"]) {
			expect(config[key]).toEqual(expected.whole_config[key]);
		}
		// Python's types count: transformers refuses a whole number where it wants a float.
		expect(readFileSync(join(folder, "whole/config.json"), "utf8")).toContain('"attention_probs_dropout_prob": 0.0');
	});

	test("the run's checkpoint converts to the same folder, and the folder to a checkpoint and back", () => {
		for (const [to, from, target] of [
			["hf", "checkpoint", "converted"],
			["native", "whole", "native"],
			["hf", "native", "back"],
		] as const) {
			expect(mimo(["convert-ckpt", "--to", to, from, target], folder).exitCode).toBe(0);
		}
		for (const name of readdirSync(join(folder, "whole")).filter((file) => file !== "mimo.json")) {
			const bytes = readFileSync(join(folder, "whole", name));
			for (const other of ["converted", "back"])
				expect(readFileSync(join(folder, other, name)).equals(bytes)).toBeTrue();
		}
	});
});

describe("three stages", () => {
	const moving = "--lr 1e-2 --moe-router-bias-update-rate 1e-3 --no-vision-position-crop".split(" ");
	const [tower, projector, language] = ["vision_model", "mlp1", "language_model"];

	test("a new projector alone, then with the language model, then all, each from the folder of the one before", () => {
		const first = ["--load-hf", parts.language, "--load-vision", parts.tower, "--freeze-vit", "--freeze-lm"];
		const { stdout } = train(...first, ...moving, "--save-hf", "stage1");
		expect(stdout).toContain("a new projector.");
		expect(changed(theirs, tensorsOf("stage1"))).toEqual([projector!]);
		train("--load-hf", "stage1", "--freeze-vit", ...moving, "--llm-offset", "0", "--save-hf", "stage2");
		expect(changed(tensorsOf("stage1"), tensorsOf("stage2"))).toEqual([language!, projector!]);
		train("--load-hf", "stage2", ...moving, "--llm-pp", "2", "--save-hf", "stage3");
		expect(changed(tensorsOf("stage2"), tensorsOf("stage3"))).toEqual([language!, projector!, tower!]);
		expect(Object.keys(tensorsOf("stage3"))).toEqual(Object.keys(tensorsOf("stage1")));
	}, 30_000);

	test("a folder that another training wrote stays", () => {
		const before = tensorsOf("stage1");
		const { exitCode, stderr } = mimo(["train", ...still, ...fromParts, "--save-hf", "stage1"], folder);
		expect(exitCode).not.toBe(0);
		expect(stderr).toBe(
			"mimo: --save-hf stage1 exists, and this training has not written it: name another folder, or remove this one.\n",
		);
		expect(tensorsOf("stage1")).toEqual(before);
	});
});

/** Modules of the encoder with adapters. */
const [ofTower, ofProjector] = [
	["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"].map((name) => `vision_model.${name}`),
	["vision_projection.linear_fc1", "vision_projection.linear_fc2"],
];
const languageTargets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj"];

const adaptedParts = [
	["the language model", "text", "--freeze-vit --freeze-projection", ["language_model"]],
	[
		"all three parts",
		"all",
		`--lora-target-modules ${[...languageTargets, ...ofTower, ...ofProjector].join(" ")}`,
		["language_model", "mlp1", "vision_model"],
	],
	["the tower alone", "tower", `--freeze-projection --lora-target-modules ${ofTower.join(" ")}`, ["vision_model"]],
] as const;
// All three parts together take what the language model (lora.test.ts has one without an encoder) and the tower take alone.
const checkedParts = process.env.MIMO_TEST_FULL === "1" ? adaptedParts : adaptedParts.slice(1, 2);

describe.each(checkedParts)("adapters of %s", (_, kind, flags, parts) => {
	const adapted = `--lora-rank 2 ${flags} --lr 1e-2 --no-vision-position-crop`.split(" ");
	const [native, merged, peft] = ["adapted", "merged", "peft"].map((name) => `${name}-${kind}`) as [
		string,
		string,
		string,
	];
	const moduleNames: readonly (readonly [string, string | RegExp, string])[] = [
		// transformers' class has a module `model` where the tensors of its folders say `backbone`, and names of its own for the encoder.
		["language_model.model.", "language_model.model.", "language_model.backbone."],
		["vision_model.encoder.layer.", "vision_model.encoder.layer.", "vision_model.radio_model.model.blocks."],
		["vision_model.", /attention\.[qkv]_proj\./, "attn.qkv."],
		["vision_model.", "attention.o_proj.", "attn.proj."],
		["multi_modal_projector.", "multi_modal_projector.linear_1.", "mlp1.1."],
		["multi_modal_projector.", "multi_modal_projector.linear_2.", "mlp1.3."],
	];

	test("are merged into the folder that the model came from, and written under its names for PEFT", () => {
		const saved = ["--save", native, "--save-interval", "1", "--save-hf", merged, "--save-peft", peft];
		train("--load-hf", "whole", ...adapted, "--encoder-tp", "2", "--llm-tp", "2", "--llm-ep", "2", ...saved);
		expect(changed(theirs, tensorsOf(merged))).toEqual([...parts]);
		expect(Object.keys(tensorsOf(merged))).toEqual(Object.keys(tensorsOf("whole")));
		const names = Object.keys(tensorsOf(peft, "adapter_model.safetensors"));
		expect(names.length).toBeGreaterThan(4);
		for (const name of names) {
			const module = name.replace("base_model.model.", "");
			const stored = moduleNames
				.filter(([start]) => module.startsWith(start))
				.reduce((text, [, theirs, ours]) => text.replace(theirs, ours), module);
			const weight = stored.replace(/lora_[AB]\.weight$/, "weight");
			expect([weight, weight in theirs]).toEqual([weight, true]);
		}
	}, 90_000);

	const python = referencePython("torch", "transformers", "peft");
	test.skipIf(python === null)(
		"are read by PEFT without a warning, and compute what the merged folder computes",
		async () => {
			const files = ["whole", peft, merged].map((name) => join(folder, name));
			const script = join(import.meta.dir, "../reference/adapters.py");
			const said = JSON.parse((await runPython(python!, [script, ...files, expectedFile])).trim().split("\n").at(-1)!);
			expect(said.warnings).toEqual([]);
			expect(said.difference).toBeLessThan(2e-5);
			expect(said.change).toBeGreaterThan(1e-3);
		},
		300_000,
	);

	test("conversions of the run's checkpoint write the same", () => {
		for (const [flags, written, file] of [
			[`--to hf ${native}`, merged, "model.safetensors"],
			[`--to peft ${native}`, peft, "adapter_model.safetensors"],
			[`--to hf --adapters ${peft} whole`, merged, "model.safetensors"],
		] as const) {
			const target = `again-${flags.replaceAll(/\W+/g, "")}`;
			const { exitCode, stdout } = mimo(["convert-ckpt", ...flags.split(" "), target, "--verify"], folder);
			expect([exitCode, stdout]).toEqual([0, expect.stringContaining("Verified: ")]);
			expect(tensorsOf(target, file)).toEqual(tensorsOf(written, file));
		}
	}, 90_000);

	test("a training goes on from them, on another layout too, and from the checkpoint", () => {
		const [file, still] = ["adapter_model.safetensors", ["--lr", "0", "--min-lr", "0"]];
		const from = ["--load-hf", "whole", "--load-peft", peft, ...adapted, ...still];
		train(...from, "--encoder-dp", "2", "--llm-pp", "2", "--save-peft", `${peft}-read`);
		expect(tensorsOf(`${peft}-read`, file)).toEqual(tensorsOf(peft, file));
		const on = ["--load", native, "--load-hf", "whole", ...adapted, "--llm-offset", "0"];
		train(...on, "--save-peft", `${peft}-on`);
		expect(tensorsOf(`${peft}-on`, file)).toEqual(tensorsOf(peft, file));
	}, 60_000);
});

test("adapters of a training whose projector trained whole are converted with a word about it", () => {
	train("--load-hf", "whole", "--lora-rank", "4", "--freeze-vit", "--save", "beside");
	const { exitCode, stderr } = mimo(["convert-ckpt", "--to", "peft", "beside", "beside-peft"], folder);
	expect([exitCode, stderr]).toEqual([
		0,
		"beside/iter_0000001: the projector has trained whole, and a PEFT folder holds adapters alone: it is left out (--to hf writes the whole model).\n",
	]);
});

test("a language model that came from no folder takes the tokenizer it was trained with", () => {
	writeFileSync(join(folder, "text.txt"), "A tiny text of few words. ".repeat(1000));
	const flags = ["--preset", "nemotron-tiny", "--data-path", "text.txt", "--tokenizer", parts.language];
	flags.push("--lr-warmup-iters", "0");
	const small = mimo(["train", ...still, ...flags], folder);
	expect([small.exitCode, small.stdout]).toEqual([1, ""]);
	expect(small.stderr).toBe(`mimo: The tokenizer ${parts.language} has 264 tokens, more than --vocab-size 256.\n`);
	train(...flags, ..."--vocab-size 264 --save-hf own".split(" "));
	const files = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"];
	expect(readdirSync(join(folder, "own")).sort()).toEqual(
		[...files, "config.json", "mimo.json", "model.safetensors"].sort(),
	);
	for (const name of files) {
		expect(readFileSync(join(folder, "own", name)).equals(readFileSync(join(parts.language, name)))).toBeTrue();
	}
});

test("a checkpoint of a model that Hugging Face's would compute otherwise is refused", () => {
	const small =
		"--preset nemotron-vlm-tiny --vision-num-layers 1 --vision-projection-type mlp --vision-projection-norm " +
		"--no-vision-final-layernorm --dataset-provider mock --train-iters 1 --lr-warmup-iters 0 --global-batch-size 4 --llm-offset 0 " +
		`--vision-position-mode window --norm-epsilon 1e-6 --save window --save-interval 1 ${deviceFlags}`;
	expect(mimo(["train", ...small.split(" ")], folder).exitCode).toBe(0);
	const { exitCode, stderr } = mimo(["convert-ckpt", "--to", "hf", "window", "window-hf"], folder);
	expect([exitCode, stderr]).toEqual([
		1,
		"mimo: window/iter_0000001: Hugging Face's vision-language model of NemotronH needs norm-epsilon 1e-5, vision-position-mode cpe.\n",
	]);
}, 30_000);

test("what does not fit is one sentence before step 1", () => {
	for (const [flags, sentence] of [
		[["--load-vision", parts.language], "(--load-vision) holds no vision tower."],
		[["--load-vision", parts.tower, "--vocab-size", "200"], "--vocab-size: the value is 200; "],
		[["--load-vision", parts.tower, "--llm-only"], "allowed only with an encoder"],
	] as const) {
		const { exitCode, stdout, stderr } = mimo(["train", ...still, "--load-hf", parts.language, ...flags], folder);
		expect(exitCode).not.toBe(0);
		expect([stdout, stderr.split("\n").length]).toEqual(["", 2]);
		expect(stderr).toContain(sentence);
	}
});
