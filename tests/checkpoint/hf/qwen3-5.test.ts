/** Folders of Qwen3.5 as they are published: the text model inside a vision-language model, with stacked experts. */
import { afterAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { openHuggingFaceModel, openParts } from "../../../src/checkpoint/hf/parts.ts";
import { openSafetensors, type TensorEntry, writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { golden } from "../../golden.ts";
import { conversionOptions } from "../conversion/options.ts";

const scratch = mkdtempSync(join(tmpdir(), "mimo-qwen3-5-"));
afterAll(() => rmSync(scratch, { recursive: true }));
const source = golden("qwen35-moe");
const config = JSON.parse(readFileSync(join(source, "config.json"), "utf8"));

/** The reference's folder in the published form, with `more` tensors of zeros and a change of its text_config. */
function published(name: string, more: Record<string, number[]> = {}, change: Record<string, unknown> = {}): string {
	const target = join(scratch, name);
	mkdirSync(target);
	const outer = { model_type: "qwen3_5_moe", text_config: { ...config, ...change }, vision_config: { depth: 1 } };
	writeFileSync(join(target, "config.json"), JSON.stringify(outer));
	using file = openSafetensors(join(source, "model.safetensors"));
	const bytes = (tensor: string) => {
		const { buffer, byteOffset, byteLength } = readTensor(file, tensor);
		return Buffer.from(buffer as ArrayBuffer, byteOffset, byteLength);
	};
	const entries: TensorEntry[] = [];
	const add = (tensor: string, shape: readonly number[], data: Uint8Array) =>
		entries.push({ name: tensor, dtype: "F32", shape, data: () => data });
	for (const [tensor, { shape }] of file.tensors) {
		const inside = tensor.replace(/^model\./, "model.language_model.");
		const [, layer, expert, part] = /^(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$/.exec(inside) ?? [];
		if (layer === undefined) add(inside, shape, bytes(tensor));
		if (layer === undefined || expert !== "0" || part === "up_proj") continue;
		const parts = part === "gate_proj" ? ["gate_proj", "up_proj"] : ["down_proj"];
		const all = Array.from({ length: config.num_experts }, (_, e) =>
			parts.map((own) => bytes(tensor.replace("experts.0.", `experts.${e}.`).replace(part!, own))),
		);
		const stacked = [config.num_experts, parts.length * shape[0]!, shape[1]!];
		add(`${layer}.${parts.length === 2 ? "gate_up_proj" : part}`, stacked, Buffer.concat(all.flat()));
	}
	for (const [tensor, shape] of Object.entries(more)) {
		add(tensor, shape, new Uint8Array(4 * shape.reduce((product, size) => product * size, 1)));
	}
	writeSafetensors(join(target, "model.safetensors"), entries);
	return target;
}

test("is the model of the reference's folder, and its tensors come back byte for byte", async () => {
	const folder = published("whole");
	using there = openHuggingFaceModel(source);
	using here = openHuggingFaceModel(folder);
	expect(here.configuration).toEqual(there.configuration);
	expect([...here.weights.tensors.keys()].sort()).toEqual([...there.weights.tensors.keys()].sort());
	for (const name of there.weights.tensors.keys()) {
		expect([name, readTensor(here.weights, name)]).toEqual([name, readTensor(there.weights, name)]);
	}
	const [native, back] = [join(scratch, "native"), join(scratch, "back")];
	for (const way of [
		{ from: "hf", to: "native", source: folder, target: native },
		{ from: "native", to: "hf", source: native, target: back },
	] as const) {
		using plan = planConversion(conversionOptions({ ...way, optimizer: false }));
		await plan.run(() => {});
	}
	const file = "model.safetensors";
	expect(readFileSync(join(back, file)).equals(readFileSync(join(folder, file)))).toBeTrue();
	// The text model alone, which transformers reads with these names.
	expect(JSON.parse(readFileSync(join(back, "config.json"), "utf8"))).toEqual(config);
});

test("the depths of multi-token prediction are left out by name", () => {
	const folder = published("more", {
		"mtp.fc.weight": [2, 4],
		"mtp.layers.0.self_attn.q_proj.weight": [2, 2],
	});
	using parts = openParts(folder, { visionHeads: null });
	expect(parts.warnings).toEqual([
		`${folder}: mtp.fc.weight is left out (as are 1 more): it predicts further tokens, which the model is trained without.`,
	]);
});

test("another number of experts than the stacks hold is refused", () => {
	const folder = published("fewer", {}, { num_experts: 7 });
	expect(() => openHuggingFaceModel(folder)).toThrow(
		/num_local_experts is 7, and model\.language_model\.layers\.0\.mlp\.experts\.gate_up_proj holds 8 experts/,
	);
});
