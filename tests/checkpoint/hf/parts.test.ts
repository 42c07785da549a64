/** Towers and whole models under every naming: the same weights, and a folder that is written is the one that was read. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { describeParts, openParts } from "../../../src/checkpoint/hf/parts.ts";
import { addTower, type TowerSpelling } from "../../../src/checkpoint/hf/tower-names.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { golden } from "../../golden.ts";
import { conversionOptions } from "../conversion/options.ts";

const source = golden("vision-language");
const [language, tower] = ["language", "tower"].map((name) => join(source, name)) as [string, string];
let folder: string;
let count = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-parts-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const newPath = () => join(folder, String(count++));
const open = (path: string) => openParts(path, { visionHeads: null });
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
	expect(read.notices).toEqual([`${path}: ${sound} is left out: it belongs to a sound encoder, which is not trained.`]);
	const native = await convert("hf", "native", path);
	expect(convert("native", "hf", native)).rejects.toThrow(/a sound encoder \(sound_config\).*--hf-reference/);
	const back = await convert("native", "hf", native, { reference: path });
	expect(
		readFileSync(join(back, "model.safetensors")).equals(readFileSync(join(path, "model.safetensors"))),
	).toBeTrue();
});
