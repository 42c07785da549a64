/** Towers and whole models under every naming: the same weights, and a folder that is written is the one that was read. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { formatPythonJson, parsePythonJson } from "../../../src/checkpoint/hf/json.ts";
import { describeParts, openParts } from "../../../src/checkpoint/hf/parts.ts";
import { keptOf, openPretrained, type Pretrained } from "../../../src/checkpoint/hf/pretrained.ts";
import { addTower, type TowerSpelling } from "../../../src/checkpoint/hf/vision-names.ts";
import { planFolder } from "../../../src/checkpoint/hf/written-folder.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { parts } from "../../train/restart/vision-language.ts";
import { conversionOptions } from "../conversion/options.ts";

const { language, tower, projector } = parts;
let folder: string;
let count = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-parts-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const newPath = () => join(folder, String(count++));
const open = (path: string) => openParts(path, { visionHeads: null });
const openLanguage = () => {
	using parts = open(language);
	return parts;
};
const values = (store: TensorStore) =>
	Object.fromEntries([...store.tensors.keys()].sort().map((name) => [name, readTensor(store, name)]));

/** The tower under other names, with another config.json. */
function respelled(spelling: TowerSpelling, config: object): string {
	using parts = open(tower);
	const builder = new CorrespondenceBuilder("here");
	addTower(builder, parts.tower!.configuration, spelling, "here");
	const mapped = new MappedStore(parts.weights, planTensors(parts.weights, builder, "foreign"));
	const path = newPath();
	mkdirSync(path);
	writeFileSync(join(path, "config.json"), JSON.stringify(config));
	const entries = [...mapped.tensors].map(([name, type]) => ({ ...type, name, data: () => readTensor(mapped, name) }));
	writeSafetensors(join(path, "model.safetensors"), entries);
	return path;
}

const radio = { model_type: "radio", num_attention_heads: 2, max_img_size: 64 };
/** As RADIO's own code describes itself: timm's name and arguments. */
const hub = {
	architectures: ["RADIOModel"],
	args: { model: "vit_tiny", num_attention_heads: 2, cpe_max_size: 64, register_multiple: 4 },
	patch_size: 8,
	max_resolution: 2048,
};

test.each([
	["transformers' names", { prefix: "", style: "transformers", classAxis: false }, radio],
	["transformers' names inside a model", { prefix: "vision_model.", style: "transformers", classAxis: false }, radio],
	["names of an earlier transformers", { prefix: "radio.", style: "transformers-bert", classAxis: true }, radio],
	["RADIO's own names", { prefix: "model.", style: "published", classAxis: false }, hub],
	["RADIO's own names inside a model", { prefix: "radio_model.model.", style: "published", classAxis: false }, hub],
] as const)("a tower under %s: the same keys and weights", (_, spelling, config) => {
	using expected = open(tower);
	using found = open(respelled(spelling, config));
	expect(found.tower!.spelling).toEqual(spelling);
	expect(describeParts(found)).toEqual(describeParts(expected));
	expect(values(found.weights)).toEqual(values(expected.weights));
});

async function convert(
	from: "hf" | "native",
	to: "hf" | "native",
	path: string,
	changes: object = {},
): Promise<string> {
	const target = newPath();
	using planned = planConversion(conversionOptions({ from, to, source: path, target, ...changes }));
	await planned.run(() => {});
	return target;
}

describe("to native and back", () => {
	test.each([
		["language model", language],
		["tower", tower],
	])("a %s: every byte of every file", async (_, path) => {
		const back = await convert("native", "hf", await convert("hf", "native", path));
		expect(readdirSync(back).sort()).toEqual(readdirSync(path).sort());
		for (const name of readdirSync(path)) {
			expect(readFileSync(join(back, name)).equals(readFileSync(join(path, name)))).toBeTrue();
		}
	});

	test("layer scales that were multiplied in come back as ones", async () => {
		const scaled = newPath();
		mkdirSync(scaled);
		writeFileSync(join(scaled, "config.json"), readFileSync(join(tower, "config.json")));
		using parts = open(tower);
		const { stored } = parts;
		const scale = (name: string) => /layer_scale/.test(name);
		const entries = [...stored.tensors].map(([name, type]) => ({
			...{ name, ...type },
			data: () => (scale(name) ? new Float32Array(type.shape[0]!).fill(0.5) : readTensor(stored, name)),
		}));
		writeSafetensors(join(scaled, "model.safetensors"), entries);
		const back = await convert("native", "hf", await convert("hf", "native", scaled));
		using read = open(scaled);
		using again = open(back);
		expect(values(again.weights)).toEqual(values(read.weights));
		expect(again.scales.length).toBe(4);
		for (const name of again.scales) expect(readTensor(again.stored, name)).toEqual(new Float32Array(32).fill(1));
		const name = "radio_model.model.blocks.0.mlp.fc2.weight";
		expect(readTensor(again.stored, name)).toEqual(
			(readTensor(stored, name) as Float32Array).map((value) => value / 2),
		);
	});
});

describe("a whole vision-language model", () => {
	const options = { beside: false, imageTokenId: 5 } as const;

	/** The folder of all parts, its config.json as `change` leaves it. */
	async function whole(change: (config: Record<string, unknown>) => object): Promise<string> {
		using pretrained = openPretrained({ loadHf: language, loadVision: tower, loadProjector: projector })!;
		const kept = keptOf(pretrained, { ...options, projector: pretrained.projector!.projector!.sizes })!;
		const { weights, language: text } = pretrained;
		const described = { visionNumAttentionHeads: 2 };
		const model = {
			path: language,
			weights,
			language: text!.language!.configuration,
			described,
			kept,
			companions: kept.companions,
		};
		const path = newPath();
		mkdirSync(path);
		planFolder(model, path, { names: null, visionHeads: null, shardBytes: 1e5 }).write(path, () => {});
		const config = parsePythonJson(readFileSync(join(path, "config.json"), "utf8"), path);
		writeFileSync(join(path, "config.json"), formatPythonJson(change(config)));
		return path;
	}

	/** As NemotronH_Nano_VL_V2 is published. */
	const published = ({
		text_config,
		image_token_id,
		projector_hidden_size,
		vision_hidden_size,
	}: Record<string, unknown>) => ({
		...{ model_type: "NemotronH_Nano_VL_V2", llm_config: text_config, img_context_token_id: image_token_id },
		...{ projector_hidden_size, vit_hidden_size: vision_hidden_size, downsample_ratio: 0.5, ps_version: "v2" },
		force_image_size: 32,
		vision_config: { args: { model: "vit_tiny_patch8", cpe_max_size: 64 }, patch_size: 8, num_attention_heads: 2 },
	});

	test("of published names and keys: the keys of its parts, and its own folder again", async () => {
		const path = await whole(published);
		using pretrained = openPretrained({ loadHf: path, loadVision: null, loadProjector: null })!;
		using apart = openPretrained({ loadHf: language, loadVision: tower, loadProjector: projector })!;
		const keysOf = ({ descriptions }: Pretrained) => Object.assign({}, ...descriptions.map(({ keys }) => keys));
		expect(keysOf(pretrained)).toEqual({ ...keysOf(apart), imageTokenId: 5 });
		expect(values(pretrained.weights)).toEqual(values(apart.weights));
		const back = await convert("native", "hf", await convert("hf", "native", path), { shardBytes: 1e5 });
		for (const name of readdirSync(path)) {
			expect(readFileSync(join(back, name)).equals(readFileSync(join(path, name)))).toBeTrue();
		}
		const text = await convert("hf", "hf", path, { drop: ["modality_submodules.*"] });
		using alone = open(text);
		expect(describeParts(alone)).toEqual(describeParts(openLanguage()));
	});

	test("is refused where config.json contradicts the projector or the patches", async () => {
		for (const [change, sentence] of [
			[{ ps_version: "v1" }, 'ps_version is "v1", this program\'s pixel shuffle has only "v2".'],
			[{ downsample_ratio: 1 }, "downsample_ratio is 1, but the projector reads rows of 128."],
			[{ projector_hidden_size: 128 }, "projector_hidden_size is 128, but the projector has 96."],
			[{ vit_hidden_size: 64 }, "vision_hidden_size (vit_hidden_size) is 64, but the tower has 32."],
			[{ img_context_token_id: "x" }, 'image_token_id is "x", expected a whole number.'],
		] as const) {
			const path = await whole((config) => ({ ...published(config), ...change }));
			expect(() => open(path)).toThrow(sentence);
		}
	});

	test("is refused with a second tower or projector", async () => {
		const path = await whole(published);
		expect(() => openPretrained({ loadHf: path, loadVision: tower, loadProjector: null })).toThrow(
			`${path} (--load-hf) holds a vision tower: --load-vision ${tower} would be a second one.`,
		);
		expect(() => openPretrained({ loadHf: path, loadVision: null, loadProjector: projector })).toThrow(
			`holds a projector: --load-projector ${projector} would be a second one.`,
		);
	});
});

test("a model with a sound encoder keeps its tensors where the folder is at hand, and is refused where it is not", async () => {
	const path = newPath();
	mkdirSync(path);
	using parts = open(language);
	const config = JSON.parse(parts.configText!);
	writeFileSync(join(path, "config.json"), JSON.stringify({ ...config, sound_config: { model_type: "parakeet" } }));
	const sound = "sound_encoder.encoder.layers.0.weight";
	const entries = [...parts.stored.tensors].map(([name, type]) => ({
		...{ name, ...type },
		data: () => readTensor(parts.stored, name),
	}));
	const extra = { name: sound, dtype: "F32", shape: [2], data: () => Float32Array.of(1, 2) } as const;
	writeSafetensors(join(path, "model.safetensors"), [...entries, extra]);
	using read = open(path);
	expect(read.warnings).toEqual([
		`${path}: ${sound} is left out: it belongs to a sound encoder, which is not trained.`,
	]);
	const native = await convert("hf", "native", path);
	await expect(convert("native", "hf", native)).rejects.toThrow(/a sound encoder \(sound_config\).*--hf-reference/);
	const back = await convert("native", "hf", native, { reference: path });
	expect(
		readFileSync(join(back, "model.safetensors")).equals(readFileSync(join(path, "model.safetensors"))),
	).toBeTrue();
});
