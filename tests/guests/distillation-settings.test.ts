/** Model Optimizer's file of a distillation: what it says, and what is refused. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { configurationOf } from "../../src/config/resolve.ts";
import { readSettings } from "../../src/guests/distillation/settings.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import { smallModel } from "../models/small.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-kd-"));
afterAll(() => rmSync(folder, { recursive: true }));
const file = join(folder, "kd.yaml");
const modelOf = (pattern: string, more = {}) =>
	hybridConfig(configurationOf({ ...smallModel, "hybrid-layer-pattern": pattern, ...more }));
const student = modelOf("M[*-]E");
const read = (text: string, teacher = modelOf("M*-E")) => {
	writeFileSync(file, text);
	return readSettings(file, student, teacher);
};

test("layers are blocks of each model's pattern, and norms those in front of them", () => {
	const text = `
logit_layers: ["output_layer", "output_layer"]
intermediate_layer_pairs:
  - ["decoder.layers.1.input_layernorm", "decoder.layers.1.input_layernorm"]
  - ["decoder.layers.1.pre_mlp_layernorm", "decoder.layers.0.norm", "mse"]
  - ["decoder.layers.1", "decoder.layers.2"]
  - ["decoder.final_layernorm", "decoder.layers.3.pre_mlp_layernorm"]
skip_lm_loss: false
kd_loss_scale: 10.0
logit_kl_temperature: 2`;
	const point = (layer: number, norm: "input" | "final" | null) => ({ layer, norm });
	expect(read(text)).toEqual({
		...{ temperature: 2, alpha: 0, rescaled: 10 },
		pairs: [
			{ student: point(1, "input"), teacher: point(1, "input"), loss: "cosine" },
			{ student: point(2, "input"), teacher: point(0, "input"), loss: "mse" },
			{ student: point(2, null), teacher: point(2, null), loss: "cosine" },
			{ student: point(3, "final"), teacher: point(3, "input"), loss: "cosine" },
		],
	});
	expect(read("{}")).toEqual({ temperature: 1, alpha: 1, rescaled: null, pairs: [] });
	expect(read("kd_loss_alpha: 0.25")).toMatchObject({ alpha: 0.25, rescaled: null });
});

test.each([
	["- 1", "it is no table of keys"],
	["kd_scale: 1", "kd_scale is no key of a distillation; allowed are logit_layers, intermediate_layer_pairs"],
	["logit_layers: [head, output_layer]", 'allowed is ["output_layer", "output_layer"]'],
	["logit_kl_topk: 8", "logit_kl_topk is 8; allowed is null"],
	["kd_loss_scale: 0", "kd_loss_scale is 0; allowed is a number greater than 0"],
	["kd_loss_alpha: 0.5\nskip_lm_loss: true", "allowed is one of both ways"],
	["intermediate_layer_pairs: [[decoder.layers.0]]", "allowed is a list of pairs of layers"],
	["intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.0, l1]]", "1: the loss is l1; it is cosine or mse"],
	["intermediate_layer_pairs: [[decoder.layers.0.mixer, decoder.layers.0]]", "student has no hidden states decoder"],
	["intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.4]]", "teacher has 4 layers, and no decoder.layers.4"],
	["intermediate_layer_pairs: [[decoder.layers.2.input_layernorm, decoder.layers.0]]", "layer 2 is moe"],
])("%j is refused", (text, sentence) => {
	expect(() => read(text)).toThrow(sentence);
	expect(() => read(text)).toThrow(file);
});

test("hidden states of another width are no pair", () => {
	const wide = modelOf("M", { "hidden-size": 64 });
	expect(() => read("intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.0]]", wide)).toThrow(
		"hidden-size 32",
	);
});
