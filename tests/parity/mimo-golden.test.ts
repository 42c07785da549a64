/** Altered or missing parts of a mimo-* folder are noticed before a step is trained, or as the value that is off. */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openSafetensors, writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { firstFailure } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { readMimoGolden } from "../../src/parity/mimo/golden.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";

const device = await testDevice();
const scratch = mkdtempSync(join(tmpdir(), "mimo-altered-"));
afterAll(() => {
	device[Symbol.dispose]();
	rmSync(scratch, { recursive: true });
});

// biome-ignore lint/suspicious/noExplicitAny: the tests reach into parsed JSON.
type Json = any;
const source = golden("mimo-participation-exact-small");
let folders = 0;

/** A copy of the folder in which `alter` has changed golden.json, or config.json. */
function altered(alter: (golden: Json, config: Json) => void): string {
	const folder = join(scratch, String(folders++));
	mkdirSync(folder);
	const read = (name: string) => JSON.parse(readFileSync(join(source, name), "utf8"));
	const [values, config] = [read("golden.json"), read("config.json")];
	alter(values, config);
	writeFileSync(join(folder, "golden.json"), JSON.stringify(values));
	writeFileSync(join(folder, "config.json"), JSON.stringify(config));
	for (const name of ["batches.safetensors", "model.safetensors"]) symlinkSync(join(source, name), join(folder, name));
	return folder;
}

const router = "language_model.decoder.layers.2.mlp.router";

describe("refused by name", () => {
	const cases: readonly [string, (golden: Json, config: Json) => void, RegExp][] = [
		[
			"no probes",
			(g) => (g.step1_probe.lanes = []),
			/golden\.json: step1_probe needs lanes and logits_lanes of 2 lanes/,
		],
		[
			"a probe that is gone",
			(g) => delete g.step1_probe.lanes[1]["vit.layer1"],
			/golden\.json has no probe vit\.layer1 of lane 1\.$/,
		],
		[
			"a probe that nothing computes",
			(g) => (g.step1_probe.lanes[0]["lm.layer9.MLPLayer"] = g.step1_probe.lanes[0]["lm.final_norm"]),
			/lane 0 has a probe lm\.layer9\.MLPLayer that nothing computes\.$/,
		],
		[
			"other layers",
			(g) => (g.step1_probe.logits = g.step1_probe.lanes[0]["lm.final_norm"]),
			/layer_names, layers and logits .* not those of its lane 0/,
		],
		["no tokens", (g) => delete g.step1_probe.tokens_per_expert[router], /tokens_per_expert has no language_model/],
		[
			"a map of other tokens",
			(g) => g.step1_probe.lanes[0][`${router}.map`].tokens_per_expert[0]++,
			/router\.map of lane 0 is not tokens_per_expert of its microbatch 1\.$/,
		],
		["no bias", (g) => (g.step1_probe.expert_bias_after_step1 = {}), /expert_bias_after_step1 has no language_model/],
		["a negative band", (g) => (g.steps[3].loss_band = -1), /loss_band of step 4 is -1; allowed is 0 to 0\.000001/],
		["a band that hides all", (g) => (g.steps[3].grad_norm_band = 1), /grad_norm_band of step 4 is 1; allowed is 0 to/],
		[
			"a band past the exact steps",
			(g) => ([g.exact_steps, g.steps[3].loss_band] = [2, 1]),
			/loss_band of step 4 is 1; allowed is 0 to 0\.02, past the exact steps\.$/,
		],
		["no exact steps", (g) => (g.exact_steps = 99), /exact_steps is 99; allowed is a whole number from 0 to 12\.$/],
		[
			"another learning rate",
			(g) => (g.steps[1].lr = 2e-3),
			/step 2 has lr 0\.002; config\.json has the constant 0\.001/,
		],
		["other participants", (g) => (g.steps[1].participants = 2), /step 2 has participants 2 .* on 1 encoder rank\.$/],
		["participants in config.json", (_, c) => (c.data.participants[1] = 2), /step 2 has .* and config\.json 2;/],
		[
			"no balancing loss of a layer",
			(g) => delete g.steps[5].seq_load_balancing_loss_layers["2"],
			/step 6 needs seq_load_balancing_loss, and seq_load_balancing_loss_layers of layers 2, 5\.$/,
		],
	];
	for (const [name, alter, message] of cases) {
		test(name, () => {
			const folder = altered(alter);
			expect(() => readMimoGolden(folder)).toThrow(message);
		});
	}

	test("gradient norms that are gone, and names that do not decay of nothing", () => {
		const gone = altered((g) => delete g.step1_probe.grad_norm["language_model.output_layer.weight"]);
		expect(() => compareAlone(device, gone, { steps: 1 })).toThrow(
			"golden.json: grad_norm has no language_model.output_layer.weight.",
		);
		const unknown = altered((_, c) => c.optimizer.no_weight_decay.push("nonsense"));
		expect(() => compareAlone(device, unknown, { steps: 1 })).toThrow("no_weight_decay has nonsense, which the model");
	});
});

describe("compared, and named where it is off", () => {
	const cases: readonly [string, (golden: Json, config: Json) => void, string][] = [
		[
			"routing weights",
			(g) => (g.step1_probe.lanes[1][`${router}.probs`].head[1] += 1e-3),
			`step 1 ${router}.probs lane 1`,
		],
		["a mean", (g) => (g.step1_probe.lanes[0]["vit.layer1"].mean += 1e-3), "step 1 vit.layer1 lane 0"],
		["an absmax", (g) => (g.step1_probe.lanes[0]["lm.final_norm"].absmax *= 1.001), "step 1 lm.final_norm lane 0"],
		["looked-up text", (g) => (g.step1_probe.lanes[0]["lm.embedding"].rms *= 1.001), "step 1 lm.embedding lane 0"],
		[
			"tokens of an expert",
			(g) => g.step1_probe.tokens_per_expert[router][1][2][3]++,
			"step 1 tokens of expert 3, layer 2, lane 1 microbatch 2",
		],
		[
			"a bias",
			(g) => (g.step1_probe.expert_bias_after_step1[`${router}.expert_bias`][5] += 1e-6),
			"step 1 expert bias 2 5",
		],
		[
			"a layer's balancing loss",
			(g) => (g.steps[0].seq_load_balancing_loss_layers["5"] *= 1.0001),
			"step 1 balancing loss of layer 5",
		],
		[
			"a norm that decays",
			(_, c) =>
				c.optimizer.no_weight_decay.splice(
					c.optimizer.no_weight_decay.indexOf("language_model.decoder.final_norm.weight"),
					1,
				),
			"weight decay of language_model.decoder.final_norm.weight",
		],
	];
	for (const [name, alter, where] of cases) {
		test(name, async () => {
			expect(firstFailure(await compareAlone(device, altered(alter), { steps: 1 }))?.name).toBe(where);
		});
	}
});

test("several ranks notice what one does, and refuse a tensor that no rank has", () => {
	const parity = (folder: string) => mimo(["parity", ...deviceFlags.split(" "), "--golden", folder, "--layout", "1+1"]);
	const probe = parity(altered((g) => (g.step1_probe.lanes[1]["lm.layer3.MLPLayer"].rms *= 1.001)));
	expect(probe.stdout).toContain("FAILED, first at step 1 lm.layer3.MLPLayer lane 1: ");
	expect(probe.exitCode).toBe(1);

	const folder = altered(() => {});
	const path = join(folder, "model.safetensors");
	rmSync(path);
	using weights = openSafetensors(join(source, "model.safetensors"));
	const entries = [...weights.tensors].map(([name, { dtype, shape }]) => ({
		...{ name, dtype, shape },
		data: () => weights.read(name),
	}));
	const nonsense = {
		name: "language_model.nonsense",
		dtype: "F32" as const,
		shape: [1],
		data: () => new Float32Array(1),
	};
	writeSafetensors(path, [...entries, nonsense]);
	const extra = parity(folder);
	expect(extra.stderr).toContain("do not match the model; 1 unexpected: language_model.nonsense");
	expect(extra.exitCode).not.toBe(0);
}, 60_000);
